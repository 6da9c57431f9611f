"""Lossless frame-of-reference coding of integer tensors, in as few bits as their range needs.

    bits, 1 byte | the minimum, in the tensor's own type | codes of that width, packed as in layout

A code is the difference from the minimum: the mask 0 0 1 1 has codes of 1 bit, the numbers 500 503 501 of 2. If all
values are equal there are no codes. If codes would save nothing, the tensor's own bytes follow a first byte of 255.

Unlike a codec's, the size of such a wire depends on the values: the receiver derives it from the first byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.base import as_bytes
from thinpipe.codecs.layout import pack, packed_bytes, unpack

INTEGERS = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
_OWN_BYTES = 255  # first byte of a wire without codes, in place of the number of bits


def most_integer_bytes(tensor_bytes: int) -> int:
    """Return the size of the largest wire of an integer tensor of ``tensor_bytes``."""
    return tensor_bytes + 1 if tensor_bytes else 0


def encode_integers(x: Tensor, wire: Tensor) -> int:
    """Fill the start of a wire from contiguous integers in host memory, which may overlap it; return the wire size."""
    if x.numel() == 0:
        return 0
    values, unsigned = _values(x), _unsigned(x)
    least, count = values.min(), x.numel()
    bits = (int(values.max()) - int(least)).bit_length()
    size = _size(bits, count, x.dtype)
    if size >= most_integer_bytes(unsigned.nbytes):
        wire.numpy()[1 : 1 + unsigned.nbytes] = unsigned.view(np.uint8)  # numpy handles the overlap
        wire[0] = _OWN_BYTES
        return most_integer_bytes(unsigned.nbytes)
    # Differences wrap modulo the width of the type; as unsigned numbers they are correct even from the minimum of
    # int64 to its maximum.
    codes = (unsigned - least.view(unsigned.dtype)).astype(np.uint64)
    if bits:
        pack(torch.from_numpy(codes.view(np.int64)), wire[1 + x.itemsize : size], bits)
    wire[1 : 1 + x.itemsize] = torch.from_numpy(np.frombuffer(least.tobytes(), np.uint8).copy())
    wire[0] = bits
    return size


def integer_bytes(wire: Tensor, count: int, dtype: torch.dtype) -> int | None:
    """Return the size of a wire of ``count`` integers from its first byte; None if invalid. It may hold anything."""
    if count == 0:
        return 0
    bits, most = int(wire[0]), most_integer_bytes(count * dtype.itemsize)
    size = most if bits == _OWN_BYTES else _size(bits, count, dtype)
    return size if bits in (*range(8 * dtype.itemsize + 1), _OWN_BYTES) and size <= most else None


def decode_integers(wire: Tensor, out: Tensor) -> None:
    """Fill contiguous integers in host memory, which may overlap the wire, from a wire of valid size."""
    if out.numel() == 0:
        return
    target, bits = _unsigned(out), int(wire[0])
    if bits == _OWN_BYTES:
        target.view(np.uint8)[:] = wire.numpy()[1 : 1 + target.nbytes]
        return
    least = wire[1 : 1 + out.itemsize].numpy().copy().view(target.dtype)
    codes = unpack(wire[1 + out.itemsize :], out.numel(), bits).numpy() if bits else 0
    target[:] = least + np.asarray(codes).astype(target.dtype)


def _size(bits: int, count: int, dtype: torch.dtype) -> int:
    return 1 + dtype.itemsize + packed_bytes(count, bits)


def _values(x: Tensor) -> np.ndarray[Any, Any]:
    return (as_bytes(x) if x.dtype == torch.bool else x.reshape(-1)).numpy()


def _unsigned(x: Tensor) -> np.ndarray[Any, Any]:
    """Return the same memory as unsigned integers."""
    return _values(x).view(f"u{x.itemsize}")
