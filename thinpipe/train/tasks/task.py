"""What a task is: data that gives batches, a model that fits them, a metric, and the recipe it is trained with.

Only the client touches data. Everything random about a batch comes from the seed it is asked with, so that a run that
was broken off goes on with the very batches it would have seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

Metric = Literal["accuracy", "matthews", "perplexity"]
Optimizer = Literal["sgd", "adamw"]
Dtype = Literal["float32", "bfloat16"]
LrSchedule = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True)
class MetricFacts:
    """How a metric is read."""

    format: str
    better: Literal["higher", "lower"]

    def best(self, one: float, other: float) -> float:
        return (max if self.better == "higher" else min)(one, other)


METRICS: dict[Metric, MetricFacts] = {
    "accuracy": MetricFacts(".1%", "higher"),
    "matthews": MetricFacts(".3f", "higher"),
    "perplexity": MetricFacts(".2f", "lower"),
}


IGNORED = -100  # the label of a position that does not count, as torch and transformers have it


class DataError(ValueError):
    """A sample cannot be had, found out while the run goes on: to start again would only meet it again."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a task is trained unless the user says otherwise."""

    batch_size: int
    chunks: int
    epochs: int
    optimizer: Optimizer
    lr: float
    lr_schedule: LrSchedule
    warmup: float = 0.0  # part of all steps over which the rate rises from 0
    momentum: float = 0.9  # SGD's
    weight_decay: float = 0.0
    clip_norm: float | None = None  # gradients of all stages together
    client_layers: tuple[int, int] = (1, 1)  # units at the start and at the end that stay with the client


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples as the model takes them. Every batch of a task has the same shapes but for the number of samples."""

    inputs: tuple[Tensor, ...]  # images [N, 3, H, W]; or token ids [N, T], and attention mask [N, T] if some are padded
    labels: Tensor  # [N] classes, or [N, T] tokens, of which IGNORED does not count; int64


class Split(Protocol):
    """Samples that are asked for by number: the training or the validation part of a data set."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        """The samples of these numbers, in this order; augmented at random if a seed is given, and alike every time.

        DataError if one of them cannot be read.
        """


@runtime_checkable
class Described(Protocol):
    """A split that can say which samples it has without reading them."""

    def describe(self, indices: Tensor) -> dict[str, bytes]:
        """What tells the samples of these numbers from others, by its name: labels; files or texts. Where they are on
        disk is no part of it."""


@runtime_checkable
class OfText(Protocol):
    """A split whose labels are tokens of a text."""

    @property
    def text_bytes(self) -> int:
        """What all labels together stand for, in UTF-8."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A task's samples, loaded by the client."""

    train: Split
    validation: Split
    classes: int
    # Files, by their names, that belong beside the model's weights and that no folder of the user's has: a tokenizer
    # that was trained on the data. A run keeps them in its folder of checkpoints, an export writes them.
    companions: Mapping[str, bytes] = field(default_factory=dict)
    notices: Sequence[str] = ()  # what the user should know of them, a line each


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model is built for; the client finds it from the data, the servers are told."""

    classes: int
    image_size: int | None = None  # pixels, both ways; None for texts
    tokens: int | None = None  # of a text; None for images
    vocabulary: int | None = None  # different tokens; None for images
    special: Sequence[int | None] | None = None  # tokens that begin, end, fill up a text; None: as the model has them
    labels: Sequence[str] | None = None  # names of the classes, on workers that read data; None: not known


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where data and weights come from, and how large they are made; what is None is the task's own choice."""

    data: Path | None = None  # on disk; None: embedded, or downloaded
    validation: Path | None = None  # on disk; None: a part of the data
    model: str | None = None  # a folder, a name of the hub, package.module:function; None: the task's own
    config: str | None = None  # from scratch: a folder, a name of the hub, a model type
    config_set: str | None = None  # what the config says otherwise, as in hidden_size=256,num_hidden_layers=4
    tokenizer: str | None = None  # a folder, or a name of the hub; None: the model's, or one is trained
    vocabulary: int | None = None  # tokens of a tokenizer that is trained
    chat_template: Path | None = None  # in place of the tokenizer's: a file of jinja
    dtype: Dtype = "float32"  # of weights, and so of activations and gradients
    trust_remote_code: bool = False  # whether code that comes with a model is run
    weights: Path | None = None  # a checkpoint on disk; None: the task's own choice
    pretrained: bool = True  # False: random weights even where the recipe starts from a checkpoint
    image_size: int | None = None
    tokens: int | None = None
    width: float | None = None  # of MobileNetV2; for RoBERTa, a factor on the size of its states
    samples: int | None = None  # at most so many for training, for a quick look


class Task(ABC):
    """One thing that can be trained; the registry in ``tasks.py`` has one of each."""

    name: str
    summary: str  # one line for --help and errors
    metric: Metric
    recipe: Recipe
    model_recipe: Recipe | None = None  # with a model that the user brings; None: the same
    modules: tuple[str, ...] = ()  # that reading and building will import: workers share them if imported ahead

    def look_for(self, source: Source) -> int | None:
        """Find out what can be found without reading samples or building the model: before there are workers.

        ValueError for what is missing. Returns how many units the model will be cut into, None if that is not known.
        """
        return None

    def weight_bytes(self, source: Source) -> int:
        """What the model's weights take at the least, told from the options alone; 0 if they do not say."""
        return 0

    @abstractmethod
    def load(self, source: Source) -> tuple[Data, Shape]:
        """Read the data: on the client alone. ValueError within seconds if it is not there, with what to get."""

    @abstractmethod
    def build(self, shape: Shape, source: Source) -> nn.Module:
        """The model, with random weights drawn from torch's generator or with a checkpoint's: on every worker.

        One of the models that ``thinpipe.pipeline.units`` can cut, or any of transformers.
        """

    def fill(self, source: Source, seed: int) -> Callable[[nn.Module, Iterable[str]], None] | None:
        """What gives parameters of the model, by their names, their values; None if ``build`` has done so."""
        return None

    def hollow(self, source: Source) -> nn.Module | None:
        """The model without weights, if it can be had without reading data: to look at its names."""
        return None

    def companions(self, source: Source) -> Mapping[str, bytes]:
        """Files, by their names, that a model of transformers has beside its weights: a tokenizer's, for one."""
        return {}
