"""Models that torch's stage trains: parameters that are unused, frozen or missing, layouts and types of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from tests.pipeline.torch_behaviours.custom import LateSends
from tests.pipeline.torch_behaviours.pipelines import (
    KINDS,
    LINEAR,
    LOOPED,
    LOSS,
    ROWS,
    V_SHAPED,
    WIDTH,
    Block,
    Pipeline,
    Placement,
    blocks,
    close,
)
from tests.pool import Pool

CHUNKS = 4
WAYS: list[tuple[Any, Placement]] = [
    (pipelining.ScheduleGPipe, LINEAR),
    (pipelining.ScheduleInterleavedZeroBubble, LOOPED),
    (pipelining.ScheduleZBVZeroBubble, V_SHAPED),
]


class Embedded(Block):
    """A first stage whose inputs are integers, which have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(self.table(x), scale)


class Unused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(3, 3)


class InPlace(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x, scale).relu_()


def some_frozen(count: int) -> list[nn.Module]:
    made = blocks(count)
    for block in made:
        block.get_submodule("first").requires_grad_(False)
    return made


def shared(count: int) -> list[nn.Module]:
    """Both layers of each block have one weight."""
    made = blocks(count)
    for block in made:
        block.get_submodule("second").weight = block.get_submodule("first").weight
    return made


MODELS: dict[str, Callable[[int], list[nn.Module]]] = {
    "integer inputs": lambda count: [*blocks(1, Embedded), *blocks(count - 1)],
    "unused parameters": lambda count: blocks(count, Unused),
    "some frozen parameters": some_frozen,
    "a shared parameter": shared,
    "in-place operations": lambda count: blocks(count, InPlace),
    "first stage without parameters": lambda count: [nn.Identity(), *blocks(count - 1)],
    "last stage without parameters": lambda count: [*blocks(count - 1), nn.Identity()],
    "middle without parameters": lambda count: [*blocks(1), *(nn.Identity() for _ in range(count - 2)), *blocks(1)],
}


def train(group: Any, kind: str, schedule: Any, placement: Placement, model: str) -> None:
    chunks = 2 if schedule is LateSends else CHUNKS
    pipeline = Pipeline(kind, group, placement, schedule, chunks, modules=MODELS[model])
    if model == "integer inputs":
        pipeline.x = torch.arange(CHUNKS * ROWS) % 11
    for _ in range(2):
        pipeline.zero_grad()
        pipeline.check_step(*pipeline.step())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("schedule", "placement"), WAYS, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.parametrize("model", MODELS)
def test_models(pool: Pool, model: str, schedule: Any, placement: Placement, kind: str) -> None:
    if kind == "torch" and model.startswith("first stage") and schedule is not pipelining.ScheduleGPipe:
        pytest.skip("torch's stage leaves out gradients of weights where no input requires a gradient")
    pool.run(train, 2, kind, schedule, placement, model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["last stage without parameters", "middle without parameters"])
def test_outputs_in_the_memory_of_inputs(pool: Pool, model: str, kind: str) -> None:
    """Tensors that ``nn.Identity`` returns stay what they are until they were sent, or to the end of the step."""
    pool.run(train, 3, kind, LateSends, {worker: (worker,) for worker in range(3)}, model)
    pool.run(train, 2, kind, pipelining.Schedule1F1B, LINEAR, model)


def with_frozen(group: Any, kind: str, schedule: Any, placement: Placement, frozen: tuple[int, ...]) -> None:
    def modules(count: int) -> list[nn.Module]:
        return [block.requires_grad_(index not in frozen) for index, block in enumerate(blocks(count))]

    pipeline = Pipeline(kind, group, placement, schedule, CHUNKS, modules=modules)
    for _ in range(2):
        pipeline.zero_grad()
        pipeline.check_step(*pipeline.step())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("schedule", "placement", "frozen"),
    [
        (pipelining.ScheduleGPipe, LINEAR, (0,)),
        (pipelining.ScheduleGPipe, LINEAR, (1,)),
        (pipelining.ScheduleInterleavedZeroBubble, LOOPED, (0, 1)),
        (pipelining.ScheduleZBVZeroBubble, V_SHAPED, (0,)),
        (pipelining.ScheduleZBVZeroBubble, V_SHAPED, (0, 1)),
        (pipelining.ScheduleZBVZeroBubble, V_SHAPED, (1, 2)),
    ],
)
def test_frozen_stages(pool: Pool, schedule: Any, placement: Placement, frozen: tuple[int, ...], kind: str) -> None:
    if kind == "torch" and 0 in frozen and schedule is not pipelining.ScheduleGPipe:
        pytest.skip("torch's stage leaves out gradients of weights where no input requires a gradient")
    pool.run(with_frozen, 2, kind, schedule, placement, frozen)


def frozen_later(group: Any, kind: str, index: int) -> None:
    pipeline = Pipeline(kind, group, LINEAR, pipelining.ScheduleGPipe, CHUNKS)
    pipeline.check_step(*pipeline.step())
    for modules in (pipeline.here, pipeline.full):
        modules[index].requires_grad_(False)
        modules[index].zero_grad()
    pipeline.zero_grad()
    pipeline.check_step(*pipeline.step())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 1])
def test_stages_frozen_between_steps(pool: Pool, index: int, kind: str) -> None:
    pool.run(frozen_later, 2, kind, index)


class Several(Block):
    """A stage with several outputs, in a list: floats with and without gradient, integers, and one that is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Block()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return [super().forward(x), (2 * x).detach(), torch.arange(len(x)), self.other(x)]


class Joined(Block):
    def forward(self, x: Tensor, y: Tensor, z: Tensor, unused: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + y + z[:, None]


class Transposed(Block):
    """A stage whose outputs are not contiguous."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x, scale).t().contiguous().t()


class Detached(Block):
    """A stage whose outputs require no gradient."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x, scale).detach()


class Complex(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return torch.complex(super().forward(x), x)


class Real(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x.real) + x.imag


PAIRS: dict[str, tuple[type[Block], type[Block]]] = {
    "several outputs": (Several, Joined),
    "transposed outputs": (Transposed, Block),
    "detached outputs": (Detached, Block),
    "complex outputs": (Complex, Real),
}


def train_pair(group: Any, kind: str, pair: str, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Compare with the full model; return the bytes before and after the codec of each link."""

    def modules(count: int) -> list[nn.Module]:
        return [made.to(dtype) for kind in PAIRS.get(pair, (Block, Block)) for made in blocks(1, kind)]

    pipeline = Pipeline(kind, group, LINEAR, pipelining.ScheduleGPipe, CHUNKS, modules=modules)
    pipeline.x, pipeline.y = pipeline.x.to(dtype), pipeline.y.to(dtype)
    for _ in range(2):
        pipeline.zero_grad()
        output, _ = pipeline.step()
    outputs = []
    for part in pipeline.x.chunk(CHUNKS):
        hidden = pipeline.full[0](part)
        outputs.append(pipeline.full[1](*hidden) if isinstance(hidden, list) else pipeline.full[1](hidden))
    LOSS(torch.cat(outputs), pipeline.y).backward()
    tolerance = {torch.float64: 1e-9, torch.bfloat16: 0.05}.get(dtype, 1e-4) if kind != "8bit" else 0.1
    if pipeline.is_last:
        assert _error(output, torch.cat(outputs)) <= tolerance
    expected = [each.grad for index in pipeline.indices for each in pipeline.full[index].parameters()]
    for found, plain in zip(pipeline.gradients(), expected, strict=True):
        if plain is not None:
            assert found is not None
            assert _error(found, plain) <= tolerance
        elif found is not None:  # of an output that nothing uses
            assert not found.any()
    links = [link for stage in pipeline.stages for link in (stage.links if kind != "torch" else ())]
    return [(link.counters().tensor_bytes, link.counters().wire_bytes) for link in links]


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm().clamp_min(1e-6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_outputs(pool: Pool, pair: str, kind: str) -> None:
    if kind == "torch" and pair != "detached outputs":
        pytest.skip("torch's stage sends contiguous tensors only, and no gradients of complex ones")
    sizes = pool.run(train_pair, 2, kind, pair, torch.float32)[0]
    if pair == "complex outputs" and kind != "torch":  # travel as they are
        assert all(tensor_bytes < wire_bytes for tensor_bytes, wire_bytes in sizes)
    elif kind == "8bit":
        assert all(wire_bytes < 0.4 * tensor_bytes for tensor_bytes, wire_bytes in sizes if tensor_bytes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(pool: Pool, dtype: torch.dtype, kind: str) -> None:
    sizes = pool.run(train_pair, 2, kind, "", dtype)[0]
    if kind == "8bit" and dtype == torch.float64:  # chunks of bfloat16 have 2 kB here
        assert all(wire_bytes < 0.2 * tensor_bytes for tensor_bytes, wire_bytes in sizes)


def gradient_of_the_batch(group: Any, kind: str) -> None:
    pipeline = Pipeline(kind, group, LINEAR, pipelining.ScheduleGPipe, CHUNKS)
    pipeline.x.requires_grad_(True)
    for _ in range(2):
        pipeline.x.grad = None
        pipeline.step()
    found, pipeline.x.grad = pipeline.x.grad, None
    pipeline.reference()
    if pipeline.is_first:
        assert found is not None
        assert pipeline.x.grad is not None
        close(found, pipeline.x.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_require_gradients(pool: Pool, kind: str) -> None:
    pool.run(gradient_of_the_batch, 2, kind)
