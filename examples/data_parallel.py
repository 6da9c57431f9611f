"""DistributedDataParallel with compressed gradients: two lines more than a script without thinpipe.

torchrun --nproc-per-node=2 examples/data_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinpipe


def main() -> None:
    dist.init_process_group("gloo")
    replica = dist.get_rank()

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)))
    state = thinpipe.ddp_state("8bit")  # with error feedback: what a message loses is added to the next gradient
    model.register_comm_hook(state, thinpipe.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)

    torch.manual_seed(1 + replica)  # every replica has its own part of the batch
    x, y = torch.randn(32, 256), torch.rand(32, 256)
    for step in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # the hook encodes, exchanges and decodes the gradients
        optimizer.step()
        if replica == 0:
            print(f"step {step}: loss {loss:.4f}")

    if replica == 0:
        print(f"gradients: {state.gradient_bytes} bytes of tensors, {state.wire_bytes} on the wire")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
