"""Stages on a GPU that talk through gloo: wires go through pinned memory, and what arrives is what arrives on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from thinpipe.pipeline import LinearSchedule, PipelineStage

CHUNKS, ROWS, WIDTH, STEPS = 8, 8, 256, 3  # more chunks than a link has under way at once; messages of 8 kB

Arrived = dict[str, Tensor]


class Scale(nn.Module):
    """Multiplies by integers: with exact inputs, every result is, in whatever order a device adds."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.arange(WIDTH) % 5 - 2.0)

    def forward(self, x: Tensor, *mask: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """The first one marks the values that are not zero, the second takes them twice."""
        return x * self.factors + sum(x * each for each in mask) if mask else (x * self.factors, x.ne(0).long())


def run(group: Any, device: str, spec: str, post_ahead: bool) -> tuple[Arrived, list[tuple[int, int]]]:
    """Return the tensors received in three steps on the same samples and one evaluation, and the bytes of the links."""
    worker, shape = group.rank(), (ROWS, WIDTH)
    module = Scale().to(device)
    hidden, mask = torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int64, device=device)
    inputs = (hidden.detach().requires_grad_(), mask) if worker else (hidden,)
    outputs = (hidden.detach().requires_grad_(), *([] if worker else [mask]))
    options: dict[str, Any] = {"forward": spec, "backward": "none" if spec == "none" else "8bit"}
    stage = PipelineStage(module, worker, 2, device, inputs, outputs, group=group, post_ahead=post_ahead, **options)
    schedule = LinearSchedule(stage, CHUNKS, lambda output, target: (output * target).sum(), order="1f1b")
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-9, 10, (CHUNKS * ROWS, WIDTH), generator=generator).float().to(device) for _ in range(2))
    arrived: Arrived = {}
    for step in range(STEPS):
        forward = x * 1.125**step  # exact, and not the same every time
        schedule.step(*([forward] if stage.is_first else []), target=y if stage.is_last else None)
        assert module.factors.grad is not None
        arrived[f"gradient {step}"] = module.factors.grad.cpu()
        module.zero_grad()
    with torch.no_grad():
        output = schedule.eval(*([x] if stage.is_first else []), target=y if stage.is_last else None)
    if stage.is_last:
        arrived["output"] = output.cpu()
    for name, kept in stage.link_state_dict().items():
        arrived |= {f"{name} {key}": value.cpu() for key, value in kept.items()}
    return arrived, [(link.counters().tensor_bytes, link.counters().wire_bytes) for link in stage.links]


def check(found: list[Any], expected: list[Any], exact_sums: bool) -> None:
    """Codecs make the same bytes on every machine, so only the order of sums may show."""
    for (arrived, sizes), (wanted, wanted_sizes) in zip(found, expected, strict=True):
        assert sizes == wanted_sizes
        assert arrived.keys() == wanted.keys()
        for name, value in wanted.items():
            if name.startswith("gradient") and not exact_sums:
                torch.testing.assert_close(arrived[name], value, rtol=1e-4, atol=1e-3, msg=name)
            else:
                assert torch.equal(arrived[name], value), name


@pytest.mark.parametrize("post_ahead", [True, False], ids=["ahead", "in order"])
@pytest.mark.parametrize("spec", ["none", "8bit", "axes:4+now"])
def test_a_gpu_through_gloo_is_a_cpu_through_gloo(pool: Pool, spec: str, post_ahead: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    cpus = pool.run(run, 2, "cpu", spec, post_ahead)
    check(pool.run(run, 2, "cuda", spec, post_ahead), cpus, exact_sums=spec == "none")


@pytest.mark.parametrize("spec", ["8bit", "axes:4+now"])
def test_the_order_of_messages_changes_nothing_and_codecs_do(pool: Pool, spec: str) -> None:
    """On CPUs, so that what GPUs are held against is known to be right."""
    ahead, in_order, plain = (
        pool.run(run, 2, "cpu", used, post_ahead) for used, post_ahead in ((spec, True), (spec, False), ("none", True))
    )
    check(in_order, ahead, exact_sums=True)
    for (arrived, sizes), (exact, exact_sizes) in zip(ahead, plain, strict=True):
        assert 1e-6 < (arrived["gradient 2"] - exact["gradient 2"]).norm() / exact["gradient 2"].norm() < 0.05
        assert all(wire < 0.6 * full for (_, wire), (_, full) in zip(sizes, exact_sizes, strict=True))
