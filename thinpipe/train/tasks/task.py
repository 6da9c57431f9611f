"""The interface of a training task: data as batches, a model that fits them, a metric, and training defaults.

Only the client reads data. All randomness of a batch comes from the seed passed with its request, so an interrupted run
resumes with the same batches that it would have seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from thinpipe.train.tasks.options import Dtype, LrSchedule, Optimizer, Source, TaskDefaults

__all__ = ["Dtype", "LrSchedule", "Optimizer", "Source", "TaskDefaults"]  # imported from here by tasks
Recipe = TaskDefaults  # its name up to version 0.2

Metric = Literal["accuracy", "matthews", "perplexity"]


@dataclass(frozen=True)
class MetricFacts:
    """The format of a metric, and which direction is better."""

    format: str
    better: Literal["higher", "lower"]

    def best(self, one: float, other: float) -> float:
        return (max if self.better == "higher" else min)(one, other)


METRICS: dict[Metric, MetricFacts] = {
    "accuracy": MetricFacts(".1%", "higher"),
    "matthews": MetricFacts(".3f", "higher"),
    "perplexity": MetricFacts(".2f", "lower"),
}

IGNORED = -100  # label of positions excluded from loss and metric, as in torch and transformers


def metric_text(name: Metric, value: float) -> str:
    """Return a metric as text."""
    return format(value, METRICS[name].format)


class DataError(ValueError):
    """A sample that cannot be read, found during the run: a restart would fail at the same sample."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples in the model's format; all batches of a task have the same shapes except for the number of samples."""

    inputs: tuple[
        Tensor, ...
    ]  # images [N, 3, H, W]; or token ids [N, T], and a mask [N, T] if some are padded, or positions if packed
    labels: Tensor  # [N] classes, or [N, T] tokens, where IGNORED is excluded; int64


class Split(Protocol):
    """The training or validation part of a data set, read by sample number.

    A split with an attribute ``repeats`` that is true ignores ``augment_seed``.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        """Return the samples of these numbers, in this order; with a seed, randomly and reproducibly augmented.

        Raises DataError if one of them cannot be read.
        """


@runtime_checkable
class Described(Protocol):
    """A split that can identify its samples without reading them."""

    def describe(self, indices: Tensor) -> dict[str, bytes]:
        """Return bytes that identify the samples of these numbers, by name: labels; files or texts.

        Their location on disk is not included.
        """


@runtime_checkable
class OfText(Protocol):
    """A split whose labels are tokens of a text."""

    @property
    def text_bytes(self) -> int:
        """The number of bytes of the text of all labels, in UTF-8."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A task's samples, loaded by the client."""

    train: Split
    validation: Split
    classes: int
    # Files, by name, that belong with the model's weights and are in no folder of the user's: a tokenizer trained on
    # the data. A run keeps them in its checkpoint folder, an export writes them.
    companions: Mapping[str, bytes] = field(default_factory=dict)
    notices: Sequence[str] = ()  # one line each about the data, for the user


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The properties of the data that a model is built for; the client derives them and sends them to the servers."""

    classes: int
    image_size: int | None = None  # pixels, height and width; None for texts
    tokens: int | None = None  # per text; None for images
    vocabulary: int | None = None  # number of different tokens; None for images
    special: Sequence[int | None] | None = None  # begin, end and padding tokens of a text; None: the model's own
    packed: bool = False  # True: several texts are one sample, and inputs are token ids and positions
    labels: Sequence[str] | None = None  # names of the classes, on workers that read data; None: not known


class Task(ABC):
    """A training task; the registry in ``tasks.py`` has one instance of each."""

    name: str
    summary: str  # one line for --help and errors
    metric: Metric
    defaults: TaskDefaults
    model_defaults: TaskDefaults | None = None  # with a model that the user brings; None: the same
    has_pairs: bool = False  # True: a sample is a chosen and a rejected text, for direct preference optimization
    modules: tuple[str, ...] = ()  # that reading and building import; preloaded so that workers share them

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("defaults", "model_defaults"):  # classes written for version 0.2 have the earlier names
            earlier = name.replace("defaults", "recipe")
            if earlier in cls.__dict__:
                setattr(cls, name, cls.__dict__[earlier])

    def preflight(self, source: Source) -> int | None:
        """Validate everything that needs neither samples nor the model, before workers start.

        Raises ValueError for what is missing. Returns the number of units of the model; None if that is not known.
        """
        return None

    def weight_bytes(self, source: Source) -> int:
        """Return a lower bound of the weights' bytes, from the options alone; 0 if they do not determine one."""
        return 0

    @abstractmethod
    def load(self, source: Source) -> tuple[Data, Shape]:
        """Read the data, on the client only; raise ValueError within seconds if it is missing, with the remedy."""

    @abstractmethod
    def build(self, shape: Shape, source: Source) -> nn.Module:
        """Build the model on every worker, with random weights from torch's generator or with a checkpoint's.

        It is an ``nn.Sequential``, whose children are the units, or any transformers model.
        """

    def weight_loader(self, source: Source, seed: int) -> Callable[[nn.Module, Iterable[str]], None] | None:
        """Return a function that loads parameters of the model, by name; None if ``build`` has loaded them."""
        return None

    def init_on_meta(self, source: Source) -> nn.Module | None:
        """Return the model on the meta device for its names; None if that needs data."""
        return None

    def companions(self, source: Source) -> Mapping[str, bytes]:
        """Return the files, by name, that belong with a transformers model's weights, such as its tokenizer's."""
        return {}
