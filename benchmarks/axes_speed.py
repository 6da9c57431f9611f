"""What axes:B takes on a GPU or the CPU: both ends of a link in one process, learning included.

    python benchmarks/axes_speed.py cuda axes:2 32,128,768 50

A step is so many milliseconds of matrix products, as a stage has them (0: none), and one tensor, encoded and decoded.
Blocks of steps without tensors and with them take turns. Prints what steps with a tensor take longer, the mean and
standard error over pairs of blocks, and what the host's main thread computes for both ends. It is ahead of a GPU: what
it waits there for the learning thread counts where the GPU runs out of work meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from thinpipe.links.slot import Route, Slot
from thinpipe.links.spec import encoding

WARM_UP, BLOCKS, STEPS, CALLS = 100, 16, 25, 100


class Both:
    """Both ends of a link, and what they spent on steps."""

    def __init__(self, device: torch.device, spec: str, shape: torch.Size) -> None:
        generator = torch.Generator(device).manual_seed(0)
        mix = torch.randn(shape[-1], shape[-1], generator=generator, device=device) / shape[-1] ** 0.5
        self.tensors = [torch.randn(shape, generator=generator, device=device) @ mix @ mix for _ in range(4)]
        self.sender, self.receiver = self.ends = encoding(spec), encoding(spec)
        for end, sends in zip(self.ends, (True, False), strict=True):
            end.attach(Route(0, 1, sends, device, None))
            end.configure([Slot(shape, torch.float32)], 1)
        self.out, self.steps = torch.empty_like(self.tensors[0]), 0
        self.forget()

    def forget(self) -> None:
        self.sent, self.host = 0, 0.0

    def step(self) -> None:
        begun, tensor = time.thread_time(), self.tensors[self.steps % 4]
        for end in self.ends:
            end.begin_step(self.steps)
            end.begin_traffic(True)
        wire = torch.empty(self.sender.form(0, 0).wire_bytes, dtype=torch.uint8, device=tensor.device)
        self.sender.encode(0, 0, tensor, wire)
        self.receiver.decode(0, 0, wire, self.out)
        self.sent, self.steps = self.sent + len(wire), self.steps + 1
        self.host += time.thread_time() - begun

    def error(self) -> float:
        last = self.tensors[(self.steps - 1) % 4]
        return float((self.out - last).square().mean() / last.square().mean())


def main(name: str, spec: str, shape_text: str, stage_ms: str = "0") -> None:
    device = torch.device(name)
    both, compute = Both(device, spec, torch.Size(map(int, shape_text.split(",")))), stage(device, float(stage_ms))

    def step() -> None:
        compute()
        both.step()

    timed(device, step, WARM_UP)
    both.forget()
    pairs = [(timed(device, compute, STEPS), timed(device, step, STEPS)) for _ in range(BLOCKS)]
    added, alone_ms = [1e3 * (more - alone) for alone, more in pairs], 1e3 * statistics.mean(pair[0] for pair in pairs)
    steps = BLOCKS * STEPS
    print(
        f"{spec} [{shape_text}] on {name}: {statistics.mean(added):.3f} ± "
        f"{statistics.stdev(added) / BLOCKS**0.5:.3f} ms more than the {alone_ms:.2f} ms of a step, "
        f"{1e3 * both.host / steps:.3f} ms of the host, {8 * both.sent / steps / both.out.numel():.2f} bits, "
        f"error {both.error():.3f}"
    )


def stage(device: torch.device, milliseconds: float) -> Callable[[], None]:
    """As many matrix products as take so long."""
    size = 4096 if device.type == "cuda" else 512
    a, b = torch.randn(size, size, device=device), torch.empty(size, size, device=device)
    timed(device, lambda: torch.mm(a, a, out=b), CALLS)
    products = round(milliseconds / 1e3 / timed(device, lambda: torch.mm(a, a, out=b), CALLS))

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, a, out=b)

    return compute


def timed(device: torch.device, call: Callable[[], object], calls: int) -> float:
    """The seconds of a call, over so many."""
    begun = now(device)
    for _ in range(calls):
        call()
    return (now(device) - begun) / calls


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main(*sys.argv[1:])
