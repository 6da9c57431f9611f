"""A codec by itself, without workers: tensor to bytes and back, and what each of several codecs loses.

python examples/compress_a_tensor.py
"""

import torch

import thinpipe


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 24, 56, 56).relu()
    buffer = torch.empty_like(x)  # decode fills a tensor that you have; nothing else is allocated for it

    for spec in ("none", "bf16", "tile:8", "tile:4", "tile:2/64", "sort:8", "kmeans:2", "topk:0.1"):
        codec = thinpipe.codec(spec)
        size = codec.wire_bytes(x.shape, x.dtype)  # known before there is a tensor, so a receiver can allocate
        wire = codec.encode(x)  # one 1-D uint8 tensor: header and packed codes
        assert wire.numel() == size
        y = codec.decode(wire, buffer)
        error = ((y - x).square().sum() / x.square().sum()).item()
        print(f"{codec.spec:10} {size} bytes, {x.nbytes / size:.1f} times smaller, relative squared error {error:.1e}")


if __name__ == "__main__":
    main()
