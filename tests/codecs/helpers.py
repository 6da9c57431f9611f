"""Shared helpers of codec tests: round trips, and specs of every family."""

from __future__ import annotations

import torch
from torch import Tensor

import thinpipe
from thinpipe.lab.bench.codecs.synthetic import CONTENTS

# At least one of every family, and of every way its wire can look.
SPECS = [
    "none",
    "fp16",
    "bf16",
    "uniform:1",
    "uniform:8",
    "uniform:13",
    "sort:6+2",
    "sort:3+1",
    "sort:12+4",
    "sort:4+0",
    "sort:3+8",
    "fast:6+2",
    "uniform:4+zero",
    "sort:3+1+zero",
    "kmeans:4+zero",
    "kmeans:1",
    "kmeans:4",
    "kmeans:7",
    "tile:1",
    "tile:4",
    "tile:2/64+sr",
    "tile:3/16+zero",
    "tile:5/4096",
    "tile:4+rot",
    "tile:8/32+sr+zero",
    "tile:6/512+rot+sr",
    "gauss:1",
    "gauss:2/64",
    "gauss:4",
    "gauss:7/1024",
    "gauss:3+unbiased",
    "gauss:5+coded",
    "gauss:3.35+coded+unbiased",
    "svd:2",
    "power:2",
    "topk:0.1",
    "topk:0.01",
    "topk:1",
]
TILES = [spec for spec in SPECS if spec.startswith("tile:")]
GAUSS = [spec for spec in SPECS if spec.startswith("gauss:")]
QUANTIZERS = [spec for spec in SPECS if spec.split(":")[0] in ("uniform", "sort", "fast", "kmeans")]


def content(name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return CONTENTS[name](shape, torch.Generator().manual_seed(seed))


def round_trip(spec: str, x: Tensor, kernels: str = "auto", dtype: torch.dtype | None = None) -> Tensor:
    codec = thinpipe.codec(spec, kernels=kernels)
    # Filled with what no codec writes, so that an element that was not written shows.
    out = torch.full(x.shape, 12345 if x.dtype != torch.bool else 1, dtype=dtype or x.dtype)
    return codec.decode(codec.encode(x), out)


def squared_error(spec: str, x: Tensor, kernels: str = "auto") -> float:
    return (round_trip(spec, x, kernels).double() - x.double()).square().sum().item()
