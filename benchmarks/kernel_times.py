"""What each GPU kernel of a codec takes, caches flushed before encoding and before decoding.

    python benchmarks/kernel_times.py 256,32,112,112 outliers sort:6+2 sort:12+4

Prints for every codec the middle of 20 durations of every kernel, in microseconds, in the order in which they ran.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

import thinpipe
from thinpipe.lab.bench.codecs.synthetic import made_cases
from thinpipe.system import meter

REPEATS = 20


def main(shape_text: str, content: str, *specs: str) -> None:
    device = torch.device("cuda")
    (case,) = made_cases([tuple(map(int, shape_text.split(",")))], [content])
    x = case.load().to(device)
    out, flush = torch.empty_like(x), meter.flush_caches(device)
    for spec in specs:
        codec = thinpipe.codec(spec)
        wire = codec.encode(x)
        codec.decode(wire, out)  # compiles
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(REPEATS):
                flush()
                codec.encode(x, out=wire)
                flush()
                codec.decode(wire, out)
            torch.cuda.synchronize()
        durations = defaultdict(list)
        for event in sorted(profiled.events(), key=lambda event: event.time_range.start):
            if event.name.endswith("_kernel"):
                durations[event.name].append(event.device_time)
        times = (f"{name} {statistics.median(times):.1f}" for name, times in durations.items())
        print(f"{spec} {content} {case.shape_text}, µs: {', '.join(times)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
