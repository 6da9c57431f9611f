"""Plain torch pipelining with compressed links. One line differs from a script without thinpipe: an import.

torchrun --nproc-per-node=2 examples/compress_links.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from thinpipe import PipelineStage  # was: from torch.distributed.pipelining import PipelineStage


def main() -> None:
    dist.init_process_group("gloo")
    worker, workers = dist.get_rank(), dist.get_world_size()
    first, last = worker == 0, worker == workers - 1

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2 * workers)]
    module = nn.Sequential(*layers[2 * worker : 2 * worker + 2])
    chunk = torch.empty(16, 256, requires_grad=True)  # one microbatch: with static shapes torch exchanges no pickles
    stage = PipelineStage(module, worker, workers, torch.device("cpu"), input_args=chunk, output_args=chunk)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    x, y = torch.randn(64, 256), torch.rand(64, 256)
    for step in range(20):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([x] if first else []), target=y if last else None, losses=losses)
        optimizer.step()
        if last:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}")

    for link in stage.links:
        count = link.counters()
        print(f"worker {worker}, {link}: {count.tensor_bytes} bytes of tensors, {count.wire_bytes} on the wire")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
