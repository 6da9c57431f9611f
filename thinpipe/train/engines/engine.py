"""The engine interface: a worker's part of a model in training, stages of a pipeline or a full replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from thinpipe.links.counters import DeviceClock
from thinpipe.links.link import Link
from thinpipe.pipeline.order import Order
from thinpipe.pipeline.report import LinkReport
from thinpipe.train.engines.finite import NonFiniteReport
from thinpipe.train.engines.loss import Loss
from thinpipe.train.engines.plan import Holding, LinkPlan
from thinpipe.train.engines.world import World
from thinpipe.train.tasks.task import Batch


@dataclass(frozen=True)
class NamedModule:
    """A stage's module with the names of its parameters and buffers in the full model."""

    module: nn.Module
    names: Mapping[str, str]  # in the stage -> in the model

    @staticmethod
    def of(module: nn.Module, model: nn.Module) -> NamedModule:
        in_model: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            in_model.setdefault(id(tensor), name)  # for tied weights the first name, as in named_parameters
        mine = module.state_dict(keep_vars=True)
        return NamedModule(module, {name: in_model[id(tensor)] for name, tensor in mine.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by their names in the full model."""
        return {self.names[name]: tensor for name, tensor in self.module.state_dict(keep_vars=True).items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        return {self.names[name]: parameter for name, parameter in self.module.named_parameters()}


class SharedNumbers:
    """Numbers of every worker that are added up with the statistics of each step; here there are none."""

    count = 0

    def numbers(self) -> list[float]:
        return []


class Engine(ABC):
    """One worker's part of a model. All workers call ``compute`` and ``predict``, with or without data."""

    world: World
    stages: dict[int, NamedModule]  # those this worker has
    stage_count: int  # of the full model
    reads_inputs: bool
    reads_labels: bool
    shares: tuple[int, int] = (0, 1)  # (index, count) of this worker's share of each training batch
    owns_state: bool  # False on replicas whose tensors worker 0 has as well
    loss: Loss  # applied to the outputs of this worker's last stage
    client_has_outcome: bool  # loss and predictions are on worker 0; otherwise they are sent there
    holdings: tuple[Holding, ...]  # of all workers: which stages each has, and what is in them
    order: Order | None = None  # of a pipeline
    # Indices of the samples in the next step, batch after batch, or in the next evaluation batch; set on every worker.
    samples: Tensor | None = None
    notices: Sequence[str] = ()  # for the user
    shared = SharedNumbers()

    def __init__(self, world: World) -> None:
        self.world = world
        self.updates = DeviceClock(world.device)  # time in the optimizer, since ``collect_links``

    @property
    def links(self) -> Sequence[Link]:
        """The link ends of this worker's stages."""
        return ()

    @abstractmethod
    def warm_up(self) -> None:
        """Compile the codecs' kernels before the first step."""

    @abstractmethod
    def compute(self, *batches: Batch | None) -> tuple[float, float]:
        """Run forward and backward of a step's batches; return this worker's part of mean loss and correct samples.

        The mean is over the labelled positions of all batches, as if they were one. A batch is None on workers
        without data.
        """

    def expect_step(self) -> None:  # noqa: B027
        """Prepare to receive what other workers send in the next ``compute``, which follows directly."""

    def cancel_prefetch(self) -> None:  # noqa: B027
        """Cancel ``expect_step``: no ``compute`` follows, on any worker. A collective."""

    @abstractmethod
    def predict(self, inputs: tuple[Tensor, ...] | None) -> Tensor | tuple[Tensor, ...] | None:
        """Return the input of ``loss`` for a full batch, without gradients; None if it is on another worker."""

    def takes(self, evaluation_batch: int) -> bool:
        """Return True if this worker takes part in the evaluation batch of this number."""
        share, count = self.shares
        return evaluation_batch % count == share

    @abstractmethod
    def non_finite_reports(self) -> list[NonFiniteReport]:
        """Return a report of non-finite values in the last step for each stage here."""

    @abstractmethod
    def sent_bytes(self) -> int:
        """Return the bytes that this worker has sent for training so far."""

    def evaluation_bytes(self) -> int:
        """Return the bytes that this worker has sent for evaluations."""
        return 0

    @abstractmethod
    def codec_state(self) -> dict[str, Tensor]:
        """Return the state of this worker's codecs, to be saved."""

    @abstractmethod
    def load_codec_state(self, saved: dict[str, Tensor]) -> None:
        """Load the codec state that ``codec_state`` returned."""

    def collect_links(self) -> tuple[list[LinkReport], float]:
        """Return link reports since the last call, and the ms this worker spent in codecs or blocked. A collective."""
        self.updates.reset()
        return [], 0.0

    def check_replicas(self, step: int) -> None:  # noqa: B027
        """Raise DriftError on all workers if replicas differ after a step. A collective."""

    def link_plans(self) -> tuple[LinkPlan, ...]:
        """Return the plans of the links between stages, of all workers."""
        return ()

    def set_levels(self, levels: Mapping[tuple[int, int], tuple[int, int]]) -> None:  # noqa: B027
        """Set the bits per value of adaptive links, by their stages: in training, other chunks and the first one."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield each parameter once, even if two stages share it, as embeddings that are also the head's weights."""
        for parameters in self.stage_parameters.values():
            yield from parameters

    @cached_property
    def stage_parameters(self) -> dict[int, list[nn.Parameter]]:
        """The parameters of each stage here; one that two stages share belongs to the first.

        Listed once: to search the modules in every step takes milliseconds.
        """
        seen: set[int] = set()
        found: dict[int, list[nn.Parameter]] = {}
        for index, stage in self.stages.items():
            found[index] = [each for each in stage.module.parameters() if id(each) not in seen]
            seen |= {id(each) for each in found[index]}
        return found

    def set_training(self, training: bool) -> None:
        for stage in self.stages.values():
            stage.module.train(training)


def to_device(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
