"""Two pipelines of two stages: thinpipe's stages on one dimension of a mesh, DDP or FSDP2 inside them on the other.

torchrun --nproc-per-node=4 examples/mesh.py          # the parameters of a stage are sharded over its replicas
torchrun --nproc-per-node=4 examples/mesh.py ddp      # or copied to all of them
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from thinpipe import PipelineStage


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, index = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    first, last = index == 0, index == 1

    torch.manual_seed(index)  # the replicas of a stage begin with the same parameters
    module = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2)))
    inner = mesh["replica"]
    replicated = DistributedDataParallel(module, process_group=inner.get_group()) if "ddp" in sys.argv else None
    stage = PipelineStage(
        replicated or fully_shard(module, mesh=inner),
        index,
        2,
        torch.device("cpu"),
        group=mesh.get_group("stage"),
        input_args=(chunk := torch.empty(8, 256, requires_grad=True)),
        output_args=chunk,
    )
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    torch.manual_seed(2 + replica)  # every replica has its own part of the batch
    x, y = torch.randn(32, 256), torch.rand(32, 256)
    for step in range(20):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([x] if first else []), target=y if last else None, losses=losses)
        optimizer.step()
        if last and replica == 0:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}")

    for link in stage.links:
        count = link.counters()
        print(f"replica {replica}, {link}: {count.tensor_bytes} bytes of tensors, {count.wire_bytes} on the wire")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
