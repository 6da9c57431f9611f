"""svd:R and power:R: low-rank factors, by SVD or power iteration, of each matrix in the last two dimensions."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinpipe.codecs.base import Codec, as_bytes, as_dtype, write_values

COLD_STEPS = 4  # subspace iterations from a random start; one is enough from the last tensor's basis
_BASIS = "power.basis"


@dataclass(frozen=True)
class LowRank(Codec):
    """A low-rank codec: ``svd`` sends the best rank-R approximation; ``power`` (subspace iteration) comes close to it.

    Factors are sent as float32. If they would be no smaller than the tensor (rank too high, or fewer than two
    dimensions), its values are sent as float32 instead.
    """

    name: Literal["svd", "power"]
    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank {self.rank} is not 1 or more")

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.rank}"

    def factor_shapes(self, shape: torch.Size) -> tuple[torch.Size, torch.Size] | None:
        """Return the shapes of the two factors, or None if they would not be smaller than the tensor."""
        if len(shape) < 2:
            return None
        rows, columns = shape[-2:]
        if self.rank * (rows + columns) >= rows * columns:
            return None
        batch = math.prod(shape[:-2])
        return torch.Size((batch, rows, self.rank)), torch.Size((batch, columns, self.rank))

    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        factors = self.factor_shapes(shape)
        return 4 * (sum(map(math.prod, factors)) if factors else math.prod(shape))

    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        shapes = self.factor_shapes(x.shape)
        if shapes is None:
            write_values(wire, x, torch.float32)
            return
        rows, columns = x.shape[-2:]
        matrices = x.view(-1, rows, columns)
        basis = _starting_basis(state, shapes[1], x.device) if self.name == "power" else None
        steps = 1 if state is not None and _BASIS in state else COLD_STEPS
        left, right = _factor_views(wire, shapes)
        batch = _batch(len(matrices))
        for start in range(0, len(matrices), batch):
            part = slice(start, start + batch)
            a = matrices[part].float()
            # 0 for finite input, NaN otherwise; added to the factor that is sent, so that NaN reaches the receiver.
            poison = (a * 0).sum()
            a = a.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            size = a.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            a = a / size  # so that products of values near float32's limits stay inside them
            if basis is None:
                u, s, vh = torch.linalg.svd(a, full_matrices=False)
                p, q = u[..., : self.rank] * s[..., None, : self.rank], vh[..., : self.rank, :].mT
            else:
                p, q = _power(a, basis[part], steps)
                if state is not None:
                    basis[part] = q
            left[part].copy_(p * size + poison)
            right[part].copy_(q)
        if wire.storage_offset() % 4:  # ``_factor_views`` had to copy the wire
            wire.copy_(torch.cat([as_bytes(left), as_bytes(right)]))
        if basis is not None and state is not None:
            state[_BASIS] = basis

    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        shapes = self.factor_shapes(out.shape)
        if shapes is None:
            out.view(-1).copy_(as_dtype(wire, torch.float32))
            return
        left, right = _factor_views(wire, shapes)
        matrices = out.view(-1, *out.shape[-2:])
        batch = _batch(len(matrices))
        for start in range(0, len(matrices), batch):
            part = slice(start, start + batch)
            matrices[part].copy_(left[part] @ right[part].mT)


def _power(a: Tensor, basis: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return factors p, q with a ~ p @ q.mT and q orthonormal, by subspace iteration from a basis of the row space."""
    q = torch.linalg.qr(basis).Q  # also makes a basis of zeros, left by a tensor of zeros, usable
    for _ in range(steps):
        p = torch.linalg.qr(a @ q).Q
        q = torch.linalg.qr(a.mT @ p).Q
    return a @ q, q


def _starting_basis(state: MutableMapping[str, Tensor] | None, shape: torch.Size, device: torch.device) -> Tensor:
    """Return the basis kept in ``state``, or a fixed random one; writable only if there is a state."""
    kept = state.get(_BASIS) if state is not None else None
    if kept is not None and kept.shape == shape:
        return kept.to(device, copy=True)
    if kept is not None and state is not None:
        del state[_BASIS]  # of another shape: this is a cold start
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(shape[1:], generator=generator).to(device).expand(shape)
    return basis if state is None else basis.clone()


def _batch(matrices: int) -> int:
    """Return the number of matrices to process at a time: linear algebra needs several copies of its input."""
    return max(1, matrices // 256)


def _factor_views(wire: Tensor, shapes: tuple[torch.Size, torch.Size]) -> tuple[Tensor, Tensor]:
    left, right = as_dtype(wire, torch.float32).split([math.prod(shape) for shape in shapes])
    return left.view(shapes[0]), right.view(shapes[1])
