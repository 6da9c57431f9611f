"""A codec of your own, one bit per value, on the activations of a pipeline: for those who study compression.

python examples/own_codec.py
thinpipe train --compress examples.own_codec:Sign    # seen from the current folder
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinpipe import Codec, LinearSchedule, PipelineStage, run_workers


@dataclass(frozen=True)
class Sign(Codec):
    """Each value as the mean magnitude with its own sign: four bytes for the mean, then one bit per value."""

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return 4 + -(-shape.numel() // 8)  # from shape and dtype alone, never from values: receivers allocate ahead

    def encode_floats(self, x: Tensor, wire: Tensor, state: object, key: int = 0) -> None:
        wire[:4] = x.float().abs().mean().reshape(1).view(torch.uint8)
        bits = nn.functional.pad(x.flatten() >= 0, (0, -x.numel() % 8)).reshape(-1, 8)
        wire[4:] = (bits * 2 ** torch.arange(8)).sum(dim=1).to(torch.uint8)

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        bits = (wire[4:, None] >> torch.arange(8)) & 1
        signs = bits.flatten()[: out.numel()].to(out.dtype) * 2 - 1
        out.copy_((signs * wire[:4].clone().view(torch.float32)).reshape(out.shape))


def train() -> None:
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 256), nn.Tanh() if first else nn.Identity())
    chunk = torch.empty(16, 256, requires_grad=True)
    stage = PipelineStage(module, dist.get_rank(), 2, "cpu", forward=Sign(), input_args=chunk, output_args=chunk)
    schedule = LinearSchedule(stage, 4, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    x, y = torch.randn(64, 256), torch.rand(64, 256)
    for step in range(20):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([x] if first else []), target=None if first else y, losses=losses)
        optimizer.step()
        if not first:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}")
    if first:
        sent = next(link.counters() for link in stage.links if "forward" in str(link))
        print(f"activations: {sent.tensor_bytes} bytes of tensors, {sent.wire_bytes} on the wire")


if __name__ == "__main__":
    run_workers(train, workers=2)
