"""A client keeps its data, its labels, and the first and last layer; two servers hold the middle.

python examples/client_server.py                                        # three local workers
torchrun --nnodes=3 --nproc-per-node=1 ... examples/client_server.py    # three machines
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import thinpipe
from thinpipe import choose_cuts, cut_units, report, run_workers, stages_of


def train() -> None:
    worker, workers = dist.get_rank(), dist.get_world_size()
    client = worker == 0

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)))
    units = thinpipe.cut(model)
    modules = cut_units(units, choose_cuts(len(units), workers, "client-server", client_layers=(1, 1)))
    chunk = torch.empty(16, 256, requires_grad=True)  # one microbatch: with static shapes torch exchanges no pickles
    stages = [
        thinpipe.PipelineStage(modules[i], i, len(modules), "cpu", input_args=chunk, output_args=chunk)
        for i in stages_of(worker, workers, "client-server")
    ]
    schedule = thinpipe.ClientServerSchedule(stages, 4, nn.functional.mse_loss, order="1f1b")
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=1.0)

    x, y = torch.randn(64, 256), torch.rand(64, 256)  # only the client's are used
    for step in range(20):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([x] if client else []), target=y if client else None, losses=losses)
        optimizer.step()
        if client:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}")

    for link in report(stages):
        if client:
            sizes = f"{link.tensor_bytes} bytes of tensors, {link.wire_bytes} on the wire"
            print(f"stage {link.source} to {link.target}: {sizes}")


if __name__ == "__main__":
    run_workers(train, workers=None if "TORCHELASTIC_RUN_ID" in os.environ else 3)
