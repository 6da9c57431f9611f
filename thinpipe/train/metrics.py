"""Loss and metrics of a split: every sample counts exactly once, for any batch size and number of chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.train.batches import evaluation_samples
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.preference import PreferenceLoss
from thinpipe.train.tasks.task import IGNORED, Data, Metric, OfText, Split


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The result of an evaluation."""

    loss: float  # mean, in nats per label
    metric: float
    accuracy: float  # over all labels
    bits_per_byte: float | None = None  # of texts


def evaluate(engine: Engine, split: Split | None, samples: int, batch_size: int, metric: Metric) -> Evaluated:
    """Return loss and metrics of a split. A collective; the result is valid on the client only.

    Stages have static shapes, so the last batch is padded, and the outputs of the padding are dropped. If the client
    does not compute the predictions itself, they are sent to it.
    """
    targets = engine.loss.targets
    first = None if split is None else targets(split.batch(torch.zeros(1, dtype=torch.int64)).labels)
    shape = [samples] if first is None else [samples, *first.shape[1:]]
    if not engine.client_has_outcome:
        shape = max(engine.world.gather(shape), key=len)  # some workers have no samples
    predictions = torch.zeros(shape, dtype=torch.int64)
    labels = torch.zeros(shape, dtype=torch.int64)
    loss = torch.zeros(1, dtype=torch.float64)
    engine.set_training(False)
    try:
        for number, start in enumerate(range(0, samples, batch_size)):
            if not engine.takes(number):
                continue
            engine.samples = evaluation_samples(samples, start, batch_size)
            batch = split.batch(engine.samples) if split is not None else None
            outputs = engine.predict(batch.inputs if batch and engine.reads_inputs else None)
            if outputs is None or batch is None:
                continue
            real = slice(start, min(start + batch_size, samples))
            here = batch.labels[: real.stop - real.start]
            labels[real] = targets(here)
            summed, predictions[real] = engine.loss.score(outputs, here)
            loss += summed
    finally:
        engine.set_training(True)
        engine.samples = None
    if not engine.client_has_outcome:
        for outcome in (predictions, labels, loss):
            engine.world.control.sum(outcome)
    counts = labels != IGNORED
    mean = float(loss) / int(counts.sum())
    predictions, labels = predictions[counts], labels[counts]
    return Evaluated(
        loss=mean,
        metric=perplexity(mean) if metric == "perplexity" else score(metric, predictions, labels),
        accuracy=score("accuracy", predictions, labels),
        bits_per_byte=_bits_per_byte(float(loss), split),
    )


def keep_reference(engine: Engine, data: Data | None, samples: Sequence[int], batch_size: int) -> None:
    """Compute the reference of a ``PreferenceLoss`` for all samples of both splits. A collective.

    ``samples``: the number of training and validation samples.
    """
    assert isinstance(engine.loss, PreferenceLoss)
    splits = (None, None) if data is None else (data.train, data.validation)
    engine.set_training(False)
    for split, count in zip(splits, samples, strict=True):
        for start in range(0, count, batch_size):
            batch = None if split is None else split.batch(evaluation_samples(count, start, batch_size))
            outputs = engine.predict(batch.inputs if batch and engine.reads_inputs else None)
            if outputs is not None and batch is not None:
                engine.loss.keep(outputs, batch.labels)
    engine.set_training(True)


def perplexity(loss: float) -> float:
    """Return exp(loss): the effective number of equally likely tokens that the model chooses among."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _bits_per_byte(nats: float, split: Split | None) -> float | None:
    """Return the bits per byte that a text could be compressed to, whatever the tokenizer; None for other data."""
    if not isinstance(split, OfText) or not split.text_bytes:
        return None
    return nats / math.log(2) / split.text_bytes


def score(metric: Metric, predictions: Tensor, labels: Tensor) -> float:
    """Return the metric of these predictions; both tensors hold class numbers, [N]."""
    if predictions.shape != labels.shape or predictions.dim() != 1 or not len(labels):
        raise ValueError(
            f"predictions and labels are class numbers of the same samples, at least one; "
            f"got shapes {tuple(predictions.shape)} and {tuple(labels.shape)}"
        )
    if metric == "accuracy":
        return ((predictions == labels).sum() / len(labels)).item()
    from sklearn.metrics import matthews_corrcoef  # imported here: it takes a second

    return float(matthews_corrcoef(labels, predictions))
