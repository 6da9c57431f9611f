"""nf4, the 4-bit type of QLoRA, as a codec: to compare with, not to use.

    thinpipe train --compress benchmarks.nf4:NormalFloat ...       # in the folder above this one
    thinpipe ablate benchmarks/nf4.toml ...
    python benchmarks/nf4.py                                       # against bitsandbytes, where that is installed

Blocks of 64 values, each divided by its largest magnitude, a float32, and rounded to the nearest of 16 levels: 4.5 bits
a value. The levels are those that bitsandbytes publishes.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe import Codec

BLOCK = 64
# fmt: off
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


@dataclass(frozen=True)
class NormalFloat(Codec):
    """Block-wise quantization to the 16 quantiles of a normal distribution that QLoRA uses."""

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return -(-math.prod(shape) // BLOCK) * (4 + BLOCK // 2)

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        levels = torch.tensor(LEVELS, device=x.device)
        flat = x.float().flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1, keepdim=True)
        scaled = blocks / torch.where(largest > 0, largest, 1)
        codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        message = wire.view(-1, 4 + BLOCK // 2)
        message[:, :4] = largest.view(torch.uint8)
        message[:, 4:] = codes[:, ::2] << 4 | codes[:, 1::2]

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        message = wire.view(-1, 4 + BLOCK // 2)
        codes = torch.stack([message[:, 4:] >> 4, message[:, 4:] & 15], -1).flatten(1)
        values = torch.tensor(LEVELS, device=out.device)[codes.long()] * message[:, :4].contiguous().view(torch.float32)
        out.view(-1).copy_(values.flatten()[: out.numel()])


def check() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) ** 3
    codec = NormalFloat()
    ours = codec.decode(codec.encode(x), torch.empty_like(x))
    theirs = dequantize_4bit(*quantize_4bit(x, blocksize=BLOCK, quant_type="nf4"))
    print(f"largest difference from bitsandbytes: {(ours - theirs).abs().max():.1e} of {x.abs().max():.1f}")


if __name__ == "__main__":
    check()
