"""What axes:B takes on a GPU or the CPU: both ends of a link in one process, learning included.

    python benchmarks/axes_speed.py cuda axes:2 32,128,768 50

A step is so many milliseconds of matrix products, as a stage has them (0: none), and one tensor, encoded and decoded.
Prints what steps with a tensor take longer than those without. The learning thread runs beside them; where a step is
shorter than its work, the next one waits for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from thinpipe.pipeline.links.slot import Route, Slot
from thinpipe.pipeline.links.spec import encoding

WARM_UP, STEPS = 100, 400


def main(name: str, spec: str, shape_text: str, stage_ms: str = "0") -> None:
    device, shape = torch.device(name), torch.Size(map(int, shape_text.split(",")))
    generator = torch.Generator(device).manual_seed(0)
    mix = torch.randn(shape[-1], shape[-1], generator=generator, device=device) / shape[-1] ** 0.5
    tensors = [torch.randn(shape, generator=generator, device=device) @ mix @ mix for _ in range(4)]
    ends = sender, receiver = encoding(spec), encoding(spec)
    for end, sends in zip(ends, (True, False), strict=True):
        end.attach(Route(0, 1, sends, device, None))
        end.configure([Slot(shape, torch.float32)], 1)
    out, sent = torch.empty_like(tensors[0]), 0
    compute = stage(device, float(stage_ms))
    alone = timed(device, compute)
    begun = now(device)
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            sent, begun = 0, now(device)
        compute()
        for end in ends:
            end.begin_step(step)
            end.begin_traffic(True)
        wire = torch.empty(sender.form(0, 0).wire_bytes, dtype=torch.uint8, device=device)
        sender.encode(0, 0, tensors[step % 4], wire)
        receiver.decode(0, 0, wire, out)
        sent += len(wire)
    added = (now(device) - begun) / STEPS - alone
    error = float((out - tensors[step % 4]).square().mean() / tensors[step % 4].square().mean())
    bits = 8 * sent / STEPS / out.numel()
    print(
        f"{spec} {list(shape)} on {name}: {added * 1e3:.3f} ms more than the {alone * 1e3:.2f} ms of a step, "
        f"{bits:.2f} bits, error {error:.3f}"
    )


def stage(device: torch.device, milliseconds: float) -> Callable[[], None]:
    """As many matrix products as take so long."""
    size = 4096 if device.type == "cuda" else 512
    a, b = torch.randn(size, size, device=device), torch.empty(size, size, device=device)
    products = round(milliseconds / 1e3 / timed(device, lambda: torch.mm(a, a, out=b)))

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, a, out=b)

    return compute


def timed(device: torch.device, call: Callable[[], object]) -> float:
    """The seconds of a call."""
    call()
    begun = now(device)
    for _ in range(STEPS // 4):
        call()
    return (now(device) - begun) / (STEPS // 4)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main(*sys.argv[1:])
