"""A worker's part of a model in training, whether that is stages of a pipeline or the whole model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinpipe.links.counters import DeviceClock
from thinpipe.pipeline.order import Order
from thinpipe.pipeline.report import LinkReport
from thinpipe.train.engines.finite import Suspicion
from thinpipe.train.engines.loss import Loss
from thinpipe.train.engines.plan import Holding, LinkPlan
from thinpipe.train.engines.world import World
from thinpipe.train.tasks.task import Batch


@dataclass(frozen=True)
class NamedModule:
    """A stage's module whose parameters and buffers are known by their names in the whole model."""

    module: nn.Module
    names: Mapping[str, str]  # in the stage -> in the model

    @staticmethod
    def of(module: nn.Module, model: nn.Module) -> NamedModule:
        in_model: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            in_model.setdefault(id(tensor), name)  # of tied weights the first, as named_parameters has it
        mine = module.state_dict(keep_vars=True)
        return NamedModule(module, {name: in_model[id(tensor)] for name, tensor in mine.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers."""
        return {self.names[name]: tensor for name, tensor in self.module.state_dict(keep_vars=True).items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        return {self.names[name]: parameter for name, parameter in self.module.named_parameters()}


class Engine(ABC):
    """One worker's part. ``compute`` and ``predict`` are called by all workers alike, with or without data."""

    world: World
    stages: dict[int, NamedModule]  # those this worker has
    stage_count: int  # of the whole model
    reads_inputs: bool
    reads_labels: bool
    shares: tuple[int, int] = (0, 1)  # of each training batch this worker takes the first-th of so many parts
    owns_state: bool  # False on replicas whose tensors worker 0 has as well
    loss: Loss  # of what this worker's last stage returns
    client_has_outcome: bool  # loss and predictions are on worker 0; otherwise they are sent there
    order: Order | None = None  # of a pipeline

    def __init__(self, world: World) -> None:
        self.world = world
        self.updates = DeviceClock(world.device)  # time in the optimizer, since ``collect_links``

    @abstractmethod
    def warm_up(self) -> None:
        """Let the codecs compile what they need: before the first step, not in it."""

    @abstractmethod
    def compute(self, *batches: Batch | None) -> tuple[float, float]:
        """Forward and backward of a step's batches: this worker's part of the mean loss, and how many were right.

        The mean is over the labelled positions of all of them, as if they were one. None where there is no data.
        """

    def expect_step(self) -> None:  # noqa: B027
        """What follows is another ``compute``: be ready for what others send in it."""

    def call_off(self) -> None:  # noqa: B027
        """It does not follow after all, on no worker. A collective."""

    @abstractmethod
    def predict(self, inputs: tuple[Tensor, ...] | None) -> Tensor | tuple[Tensor, ...] | None:
        """What ``loss`` takes, of a full batch, where it ends up; None elsewhere. In evaluation mode, no gradients."""

    @abstractmethod
    def takes(self, evaluation_batch: int) -> bool:
        """Whether this worker has a part in an evaluation batch, by its number."""

    @abstractmethod
    def suspicions(self) -> list[Suspicion]:
        """What was not finite in the last step."""

    @abstractmethod
    def sent_bytes(self) -> int:
        """What this worker has sent for training since it was made."""

    def evaluation_bytes(self) -> int:
        """What this worker has sent for evaluations."""
        return 0

    @abstractmethod
    def memory(self) -> dict[str, Tensor]:
        """What codecs remember on this worker, to be saved."""

    @abstractmethod
    def recall(self, memory: dict[str, Tensor]) -> None:
        """Take back what ``memory`` returned."""

    @abstractmethod
    def holdings(self) -> tuple[Holding, ...]:
        """Who holds what: of all workers."""

    @abstractmethod
    def tell_samples(self, samples: Tensor) -> None:
        """The numbers of the samples in the next training step, batch after batch; on every worker."""

    def collect_links(self) -> tuple[list[LinkReport], float]:
        """What links did since the last call, and the ms this worker spent in codecs or blocked. A collective."""
        self.updates.reset()
        return [], 0.0

    @abstractmethod
    def check_replicas(self, step: int) -> None:
        """Raise on all workers if replicas are not the same any more after a step. A collective."""

    def link_plans(self) -> tuple[LinkPlan, ...]:
        """What will travel between stages: of all workers."""
        return ()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each once, though two stages may share it: embeddings that are the head's weights as well."""
        for parameters in self.stage_parameters().values():
            yield from parameters

    def stage_parameters(self) -> dict[int, list[nn.Parameter]]:
        """Those of each stage here; what two of them share is the first one's."""
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
