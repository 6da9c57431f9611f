"""Pipelines under torch's schedules, with torch's stage or thinpipe's, compared with the model in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from tests.pipeline.models import Through, batch
from thinpipe.codecs.recipes import directions
from thinpipe.codecs.spec import codec
from thinpipe.links.message import CHECKSUM_BYTES
from thinpipe.pipeline import PipelineStage

WIDTH = 128  # a chunk of 8 rows has 4 kB, from which on it is encoded
ROWS = 8
KINDS = ("torch", "none", "8bit")  # torch's stage; thinpipe's with this codec in both directions
LOSS = nn.MSELoss(reduction="sum")

Placement = Mapping[int, Sequence[int]]  # the stages of each worker
LINEAR: Placement = {0: (0,), 1: (1,)}
LOOPED: Placement = {0: (0, 2), 1: (1, 3)}
V_SHAPED: Placement = {0: (0, 3), 1: (1, 2)}


class Block(nn.Module):
    """A residual block, so that activations and gradients keep their scale over many stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = x if scale is None else x * scale
        return x + self.second(torch.relu(self.first(x)))


def blocks(count: int, kind: type[Block] = Block) -> list[nn.Module]:
    """Return the modules of all stages, the same on every worker."""
    torch.manual_seed(0)
    return [kind() for _ in range(count)]


def make_stage(kind: str, group: Any, module: nn.Module, index: int, count: int, **options: Any) -> Any:
    """Return torch's stage, or thinpipe's with ``kind`` as its codec."""
    if kind == "torch":
        return pipelining.PipelineStage(module, index, count, torch.device("cpu"), group=group, **options)
    return PipelineStage(module, index, count, "cpu", group=group, forward=kind, backward=kind, **options)


class Pipeline:
    """This worker's stages and schedule, and the same model in one piece."""

    def __init__(
        self,
        kind: str,
        group: Any,
        placement: Placement,
        schedule: Any,
        chunks: int,
        *,
        modules: Callable[[int], list[nn.Module]] = blocks,
        stage_options: Callable[[int], dict[str, Any]] | None = None,
        **schedule_options: Any,
    ) -> None:
        count = sum(map(len, placement.values()))
        self.kind, self.chunks = kind, chunks
        self.here, self.full = modules(count), modules(count)
        self.indices = placement[group.rank()]
        self.worker_of = {index: worker for worker, indices in placement.items() for index in indices}
        self.stages = [
            make_stage(kind, group, self.here[index], index, count, **(stage_options(index) if stage_options else {}))
            for index in self.indices
        ]
        takes_one = issubclass(schedule, PipelineScheduleSingle)
        options = {"loss_fn": LOSS, "scale_grads": False} | schedule_options
        self.schedule = schedule(self.stages[0] if takes_one else self.stages, chunks, **options)
        self.x, self.y = batch(ROWS * chunks, WIDTH)

    @property
    def is_first(self) -> bool:
        return 0 in self.indices

    @property
    def is_last(self) -> bool:
        return len(self.here) - 1 in self.indices

    @property
    def inputs(self) -> list[Tensor]:
        """Return the arguments of the schedule on this worker: the batch if it has the first stage."""
        return [self.x] if self.is_first else []

    def step(self, **options: Any) -> tuple[Any, list[Tensor]]:
        """Return output and losses of a training step."""
        losses: list[Tensor] = []
        target = self.y if self.is_last else None
        output = self.schedule.step(*self.inputs, target=target, losses=losses, **options)
        return output, losses

    def evaluate(self) -> tuple[Any, list[Tensor]]:
        """Return output and losses of an evaluation."""
        losses: list[Tensor] = []
        target = self.y if self.is_last else None
        return self.schedule.eval(*self.inputs, target=target, losses=losses), losses

    def zero_grad(self) -> None:
        for module in self.here:
            module.zero_grad()

    def gradients(self) -> list[Tensor | None]:
        return [each.grad for index in self.indices for each in self.here[index].parameters()]

    def reference(self, **kwargs: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and loss of the full model, with this pipeline's codec between workers; sets gradients."""
        for module in self.full:
            module.zero_grad()
        output = self._run(self.kind == "8bit", kwargs)
        losses = [LOSS(part, y) for part, y in zip(output, self.y.tensor_split(self.chunks), strict=True)]
        loss = torch.stack(losses).sum()
        loss.backward()
        if self.kind == "8bit":
            with torch.no_grad():
                assert not torch.equal(torch.cat(output), torch.cat(self._run(False, kwargs)))
        return torch.cat(output).detach(), loss.detach()

    def _run(self, is_lossy: bool, kwargs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the outputs of the full model for each chunk."""
        outputs = []
        for chunk, part in enumerate(self.x.tensor_split(self.chunks)):
            given = {name: value.tensor_split(self.chunks)[chunk] for name, value in kwargs.items()}
            for index, module in enumerate(self.full):
                if is_lossy and index and self.worker_of[index] != self.worker_of[index - 1]:
                    part = Through.apply(part, *map(codec, directions("8bit")), ({}, {}))
                part = module(part, **given)
            outputs.append(part)
        return outputs

    def check_step(self, output: Any, losses: list[Tensor], **kwargs: Tensor) -> None:
        """Compare output, losses and gradients of a step with those of the full model."""
        expected, loss = self.reference(**kwargs)
        self.check_output(output, expected)
        if self.is_last:
            assert len(losses) == self.chunks
            close(torch.stack(losses).sum(), loss)
        self.check_gradients()
        self.check_bytes()

    def check_output(self, output: Any, expected: Tensor) -> None:
        if self.is_last:
            close(output, expected)

    def check_gradients(self) -> None:
        expected = [each.grad for index in self.indices for each in self.full[index].parameters()]
        found = self.gradients()
        assert [each is None for each in found] == [each is None for each in expected]
        for mine, plain in zip(found, expected, strict=True):
            if mine is not None and plain is not None:
                close(mine, plain)

    def check_bytes(self) -> None:
        """Compressed tensors are smaller on the wire; uncompressed ones are not."""
        if self.kind == "torch":
            return
        links = [link for stage in self.stages for link in stage.links]
        assert links
        for link in links:
            counters = link.counters()
            wire_bytes = counters.wire_bytes - CHECKSUM_BYTES * counters.messages
            assert counters.messages > 0, link
            if self.kind == "8bit":
                assert wire_bytes < 0.4 * counters.tensor_bytes
            else:
                assert wire_bytes == counters.tensor_bytes


def close(found: Tensor, expected: Tensor) -> None:
    """Compare with the tolerances of torch's own tests."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=4e-5)
