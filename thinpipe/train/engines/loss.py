"""Cross-entropy over the labelled positions of a step, chunk by chunk.

Logits of texts are as wide as the vocabulary: if it is large, those of a chunk take more memory than all else. So the
last unit of a language model returns the inputs of its logits. The logits are computed here, some positions at a time,
and recomputed in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from thinpipe.train.models.unit_modules import TailUnit
from thinpipe.train.tasks.task import IGNORED

PIECE = 1 << 26  # maximum number of logits in memory at once; more on a GPU with more than 16 GiB
GPU_SHARE = 256  # bytes of a GPU's memory for each of these: about 5 % of it, with their gradients


class Deferred(nn.Module):
    """The last unit of a language model: has the weights of the head; ``Loss`` computes the logits."""

    def __init__(self, tail: TailUnit) -> None:
        super().__init__()
        self.tail = tail

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


class Loss:
    """The loss of logits, or of the inputs of ``head`` for them; labels are [N] classes or [N, T] tokens."""

    def __init__(
        self, head: TailUnit | None, *, device: torch.device, amp: bool = False, piece: int | None = None
    ) -> None:
        self._head, self._device, self._amp = head, device, amp
        self._piece = piece_on(device) if piece is None else piece
        self._share = 1.0  # weight of one labelled position in the mean over a step, times chunks
        self._right: list[Tensor] = []
        self._samples = 0.0  # that one correct position counts as

    def begin(self, labels: Tensor, chunks: int, labelled: int | None = None, replicas: int = 1) -> None:
        """Begin a step; ``labels`` are of this worker's share, ``labelled`` counts positions in all shares."""
        total = max(count_labelled(labels) if labelled is None else labelled, 1)
        self._share = chunks * replicas / total
        self._samples = len(labels) * replicas / total
        self._right = []

    def targets(self, labels: Tensor) -> Tensor:
        """Return what predictions are compared with."""
        return labels

    def __call__(self, outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """Return a chunk's part of the mean over the step, times the number of chunks."""
        if labels.dim() == 1:
            assert isinstance(outputs, Tensor)
            self._right.append((outputs.argmax(-1) == labels).sum())
            return functional.cross_entropy(outputs.float(), labels)
        pieces = list(self._pieces(labels))
        total: Tensor | None = None
        for places in pieces:
            if len(pieces) == 1:
                loss, predicted = self._of(outputs, labels, places)
            else:
                loss, predicted = checkpoint(self._of, outputs, labels, places, use_reentrant=False)
            self._right.append((predicted == labels[:, places]).sum())
            total = loss if total is None else total + loss
        assert total is not None
        return total * self._share

    def correct(self) -> float:
        """Return the correct samples of the step; a text counts as the fraction of its labels that is correct."""
        return float(torch.stack(self._right).sum()) * self._samples

    def score(self, outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> tuple[float, Tensor]:
        """Return summed loss and predictions, on the CPU, of the first samples of a batch, one for each label row."""
        labels = labels.to(self._device)
        if labels.dim() == 1:
            assert isinstance(outputs, Tensor)
            logits = outputs[: len(labels)].float()
            return functional.cross_entropy(logits, labels, reduction="sum").item(), logits.argmax(-1).cpu()
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        rest = labels.new_full((len(first) - len(labels), *labels.shape[1:]), IGNORED)
        padded, losses, predictions = torch.cat([labels, rest]), [], []
        with torch.no_grad():
            for places in self._pieces(padded):
                loss, predicted = self._of(outputs, padded, places)
                losses.append(loss.double())
                predictions.append(predicted)
        return torch.stack(losses).sum().item(), torch.cat(predictions, dim=1)[: len(labels)].cpu()

    def _of(self, outputs: Any, labels: Tensor, places: slice) -> tuple[Tensor, Tensor]:
        """Return summed loss and predictions of these positions."""
        logits = self._logits(outputs, places)
        here = labels[:, places]
        loss = functional.cross_entropy(
            logits.float().flatten(0, 1), here.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return loss, logits.detach().argmax(-1)

    def _logits(self, outputs: Any, places: slice) -> Tensor:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._amp):
            logits: Tensor = outputs[:, places] if self._head is None else self._head.logits(outputs, places)
        return logits

    def _pieces(self, labels: Tensor) -> Iterator[slice]:
        rows, length = labels.shape
        width = 1 if self._head is None else self._head.cut.logits.shape[-1]
        step = max(self._piece // (rows * width), 1)
        step = math.ceil(length / math.ceil(length / step))  # all of about the same size
        return (slice(start, min(start + step, length)) for start in range(0, length, step))


def piece_on(device: torch.device) -> int:
    """Return the maximum number of logits in memory at once: pieces are computed twice, a single one only once."""
    if device.type != "cuda":
        return PIECE
    return max(PIECE, torch.cuda.get_device_properties(device).total_memory // GPU_SHARE)


def count_labelled(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())
