"""The kernels of the codecs: one module per kind of device, each with all functions of ``Kernels``."""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """The interface of a kernel module: the functions that the codecs call.

    Tensors are contiguous, floats of any type in ``FLOATS``, and not empty. Wires have the size that the codec
    computes and may start at any byte; a wire to decode may hold anything.
    """

    def encode_sort(self, x: Tensor, wire: Tensor, level_bits: int, split_bits: int, zero: bool = False, /) -> None: ...

    def encode_fast(self, x: Tensor, wire: Tensor, level_bits: int, split_bits: int, zero: bool = False, /) -> None: ...

    def decode_buckets(self, wire: Tensor, out: Tensor, level_bits: int, split_bits: int, /) -> None: ...

    def encode_kmeans(self, x: Tensor, wire: Tensor, bits: int, zero: bool = False, /) -> None: ...

    def decode_kmeans(self, wire: Tensor, out: Tensor, bits: int, /) -> None: ...

    def encode_tile(
        self, x: Tensor, wire: Tensor, bits: int, tile: int, rot: bool, sr: bool, zero: bool, key: int, /
    ) -> None: ...

    def decode_tile(self, wire: Tensor, out: Tensor, bits: int, tile: int, rot: bool, zero: bool, /) -> None: ...

    def encode_gauss(
        self, x: Tensor, wire: Tensor, bits: int, tile: int, channels: int, inner: int, unbiased: bool, seed: int, /
    ) -> None: ...

    def decode_gauss(self, wire: Tensor, out: Tensor, bits: int, tile: int, channels: int, inner: int, /) -> None: ...

    def encode_coded(
        self, x: Tensor, wire: Tensor, budget: int, channels: int, inner: int, unbiased: bool, seed: int, /
    ) -> None: ...

    def decode_coded(self, wire: Tensor, out: Tensor, budget: int, channels: int, inner: int, /) -> None: ...

    def encode_topk(self, x: Tensor, wire: Tensor, kept: int, /) -> None: ...

    def decode_topk(self, wire: Tensor, out: Tensor, kept: int, /) -> None: ...

    def find_gains(self, z: Tensor, share: Tensor, gains: Tensor, /) -> None: ...

    def encode_axes(
        self, z: Tensor, gains: Tensor, bits: Tensor, starts: Tensor, limits: Tensor, planes: Tensor, /
    ) -> None: ...

    def decode_axes(
        self, planes: Tensor, gains: Tensor, bits: Tensor, starts: Tensor, levels: Tensor, z: Tensor, /
    ) -> None: ...

    def fold_moments(
        self, step: Tensor, size: int, rate: float, seen: int, before: Tensor, weight: Tensor, moments: Tensor,
        new_weight: Tensor, /
    ) -> None: ...  # fmt: skip


def select(name: str, device: torch.device) -> Kernels:
    """Return the kernels that run on a device, or the plain torch ones for ``"reference"``.

    They are imported on first use: numba takes longer to import than everything else in thinpipe together.
    """
    if name == "reference":
        from thinpipe.codecs.kernels import reference

        return reference
    if name != "auto":
        raise ValueError(f"kernels are 'auto' or 'reference', got {name!r}")
    if device.type == "cpu":
        from thinpipe.codecs.kernels import cpu

        return cpu
    if device.type != "cuda":
        raise RuntimeError(
            f"there are no codec kernels for device {device.type!r}, only for cpu, cuda; "
            "move the tensor, or ask for kernels='reference' (slow)"
        )
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            "codec kernels for GPUs are written in Triton, which is not installed: pip install triton, of the release "
            f"that fits torch {torch.__version__}; or move the tensor to the CPU, or ask for kernels='reference' (slow)"
        )
    from thinpipe.codecs.kernels import cuda

    return cuda
