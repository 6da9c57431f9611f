"""One step as a picture: when each worker computed, encoded, waited, and which messages were in transit.

python examples/trace_a_step.py OUTPUT_DIRECTORY    # writes step.png, and step.json for chrome://tracing or Perfetto
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from thinpipe import LinearSchedule, PipelineStage, draw, gather_step, run_workers, write_chrome_trace


def main(directory: Path) -> None:
    worker, workers = dist.get_rank(), dist.get_world_size()
    first, last = worker == 0, worker == workers - 1

    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)))
    chunk = torch.empty(64, 512, requires_grad=True)  # one microbatch: with static shapes torch exchanges no pickles
    stage = PipelineStage(module, worker, workers, "cpu", input_args=chunk, output_args=chunk)
    schedule = LinearSchedule(stage, 4, nn.functional.mse_loss, order="1f1b")

    x, y = torch.randn(256, 512), torch.rand(256, 512)
    for step in range(3):  # codecs compile and buffers are allocated in the first steps
        if step == 2:
            stage.trace()
        schedule.step(*([x] if first else []), target=y if last else None)

    bars = gather_step([stage])  # a collective: every worker calls it
    if worker == 0:
        draw(bars, directory / "step.png")
        write_chrome_trace(bars, directory / "step.json")
        for kind in sorted({bar.kind for bar in bars}):
            total = sum(bar.end_ms - bar.start_ms for bar in bars if bar.kind == kind)
            print(f"{kind}: {total:.1f} ms in {sum(bar.kind == kind for bar in bars)} bars")


if __name__ == "__main__":
    run_workers(main, Path(sys.argv[1] if len(sys.argv) > 1 else "."), workers=2)
