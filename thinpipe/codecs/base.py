"""The ``Codec`` interface: encode a tensor into one uint8 wire buffer of a known size, and decode it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinpipe.codecs.kernels import Kernels, select

# The float types that codecs compress. All others (integers, bool, complex, 8-bit floats) are sent raw.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Codec(ABC):
    """An encoder of one tensor into one message, and its decoder.

    A codec is a value: it holds its settings and no state between calls. A codec that warm-starts from its last
    result (``power``) keeps its state in the mapping that the link passes as ``state``. A codec with stochastic
    rounding (``+sr``) is seeded by ``key``, which is different for each message.
    """

    @property
    def spec(self) -> str:
        """The canonical text of this codec, ``thinpipe.codec(c.spec) == c``; by default ``package.module:Class``."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @classmethod
    def parse(cls, arguments: str) -> Codec:
        """Return the codec of ``package.module:Class:ARGUMENTS``; raise ValueError if they are invalid.

        ``arguments`` is empty without the second colon. A class with arguments appends them to its ``spec``.
        """
        if arguments:
            raise ValueError(f"{arguments!r} is one argument too many")
        return cls()

    @abstractmethod
    def float_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the wire bytes of a float tensor that is not empty."""

    @abstractmethod
    def encode_floats(self, x: Tensor, wire: Tensor, state: MutableMapping[str, Tensor] | None, key: int = 0) -> None:
        """Fill ``wire`` (of ``float_bytes``) from ``x``: contiguous, float, not empty."""

    @abstractmethod
    def decode_floats(self, wire: Tensor, out: Tensor) -> None:
        """Fill ``out``: contiguous, float, not empty. ``wire`` has the right size; its contents may be anything."""

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the exact size of the wire, from shape and dtype alone, so that a receiver can preallocate."""
        shape = torch.Size(shape)
        count = math.prod(shape)
        if count == 0:
            return 0
        return self.float_bytes(shape, dtype) if dtype in FLOATS else count * dtype.itemsize

    def encode(
        self, x: Tensor, out: Tensor | None = None, *, state: MutableMapping[str, Tensor] | None = None, key: int = 0
    ) -> Tensor:
        """Compress ``x``, which stays untouched, into ``out`` or a new buffer on its device; return the buffer.

        Stochastic rounding (``+sr``) depends on ``key`` alone: the same tensor and key give the same wire.
        """
        if not 0 <= key < 1 << 64:
            raise ValueError(f"{self.spec}: a key is an integer of 64 bits, from 0 to 2^64 - 1, got {key}")
        if x.layout is not torch.strided:
            raise ValueError(f"{self.spec}: encodes dense tensors, got layout {x.layout}; call x.to_dense() first")
        expected = self.wire_bytes(x.shape, x.dtype)
        if out is None:
            out = torch.empty(expected, dtype=torch.uint8, device=x.device)
        else:
            self._check_buffer(out, x.device)
            if out.numel() != expected:
                raise ValueError(self._size_error(f"{expected} bytes", out, x))
        if x.numel() == 0:
            return out
        x = x.detach().resolve_conj().resolve_neg().contiguous()
        if x.dtype in FLOATS:
            self.encode_floats(x, out, state, key)
        else:
            out.copy_(as_bytes(x))
        return out

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        """Decompress ``wire`` into ``out``, a contiguous tensor of the encoded shape, and return it."""
        if not out.is_contiguous():
            raise ValueError(f"{self.spec}: decodes into contiguous tensors, got strides {out.stride()}")
        self._check_buffer(wire, out.device)
        dtypes = FLOATS if out.dtype in FLOATS else (out.dtype,)
        sizes = sorted({self.wire_bytes(out.shape, dtype) for dtype in dtypes})
        if wire.numel() not in sizes:
            raise ValueError(self._size_error(" or ".join(map(str, sizes)) + " bytes", wire, out))
        if out.numel() == 0:
            return out
        target = out.detach()
        if out.dtype in FLOATS:
            self.decode_floats(wire, target)
        else:
            as_bytes(target).copy_(wire)
        return out

    def _check_buffer(self, wire: Tensor, device: torch.device) -> None:
        if wire.dtype != torch.uint8 or wire.dim() != 1 or not wire.is_contiguous():
            raise ValueError(
                f"{self.spec}: a wire is a contiguous 1-D uint8 tensor, "
                f"got {wire.dim()}-D {wire.dtype} with strides {wire.stride()}"
            )
        if wire.device != device:
            raise ValueError(f"{self.spec}: wire and tensor share a device, got {wire.device} and {device}")

    def _size_error(self, expected: str, wire: Tensor, tensor: Tensor) -> str:
        return (
            f"{self.spec}: the wire of a {tensor.dtype} tensor of shape {tuple(tensor.shape)} "
            f"has {expected}, got {wire.numel()}"
        )

    def __str__(self) -> str:
        return self.spec


@dataclass(frozen=True)
class KernelCodec(Codec):
    """A codec whose work is done by the kernels of the tensor's device."""

    # "auto", "reference", or kernels to use on any device. Not part of the codec's identity: all write the same wires.
    kernels: str | Kernels = field(default="auto", kw_only=True, repr=False, compare=False)

    def kernels_on(self, device: torch.device) -> Kernels:
        return select(self.kernels, device) if isinstance(self.kernels, str) else self.kernels


def as_bytes(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a 1-D uint8 view."""
    return x.reshape(-1).view(torch.uint8)


def as_dtype(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as values of a wider type: a view, or a copy if the bytes are not aligned to it."""
    return (wire.clone() if wire.storage_offset() % dtype.itemsize else wire).view(dtype)


def write_values(wire: Tensor, values: Tensor, dtype: torch.dtype) -> None:
    """Fill a wire with values rounded to a type; makes no copy if the wire can be viewed as that type."""
    if wire.storage_offset() % dtype.itemsize:
        wire.copy_(as_bytes(values.to(dtype)))
    else:
        wire.view(dtype).copy_(values.reshape(-1))
