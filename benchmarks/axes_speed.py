"""What axes:B takes on a GPU or the CPU: both ends of a link in one process, learning included.

    python benchmarks/axes_speed.py cuda axes:2 32,128,768

A step is one tensor, encoded and decoded; the learning thread runs beside it. Prints milliseconds per step.
"""

from __future__ import annotations

import sys
import time

import torch

from thinpipe.pipeline.links.slot import Route, Slot
from thinpipe.pipeline.links.spec import encoding

WARM_UP, STEPS = 100, 400


def main(name: str, spec: str, shape_text: str) -> None:
    device, shape = torch.device(name), torch.Size(map(int, shape_text.split(",")))
    generator = torch.Generator(device).manual_seed(0)
    mix = torch.randn(shape[-1], shape[-1], generator=generator, device=device) / shape[-1] ** 0.5
    tensors = [torch.randn(shape, generator=generator, device=device) @ mix @ mix for _ in range(4)]
    ends = sender, receiver = encoding(spec), encoding(spec)
    for end, sends in zip(ends, (True, False), strict=True):
        end.attach(Route(0, 1, sends, device, None))
        end.configure([Slot(shape, torch.float32)], 1)
    out, sent = torch.empty_like(tensors[0]), 0
    begun = now(device)
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            sent, begun = 0, now(device)
        for end in ends:
            end.begin_step(step)
            end.begin_traffic(True)
        wire = torch.empty(sender.form(0, 0).wire_bytes, dtype=torch.uint8, device=device)
        sender.encode(0, 0, tensors[step % 4], wire)
        receiver.decode(0, 0, wire, out)
        sent += len(wire)
    total = now(device) - begun
    error = float((out - tensors[step % 4]).square().mean() / tensors[step % 4].square().mean())
    bits = 8 * sent / STEPS / out.numel()
    print(f"{spec} {list(shape)} on {name}: {total / STEPS * 1e3:.3f} ms a step, {bits:.2f} bits, error {error:.3f}")


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main(*sys.argv[1:4])
