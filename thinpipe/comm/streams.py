"""Streams of bytes: tensors cut into pieces that are sent, written or hashed one at a time, and filled again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from xxhash import xxh3_128

from thinpipe.comm.control import ACTIVITY

PIECE = 4 << 20  # bytes that are written, hashed or sent at a time


class HashedPieces:
    """An iterable of pieces that are counted and hashed as they pass."""

    def __init__(self, pieces: Iterable[Tensor]) -> None:
        self._pieces, self._hash, self.bytes = pieces, xxh3_128(), 0

    def __iter__(self) -> Iterator[Tensor]:
        for piece in self._pieces:
            self._hash.update(memory_of(piece))
            self.bytes += piece.numel()
            ACTIVITY.done += 1  # progress: a slow disk is not a stall
            yield piece

    def hexdigest(self) -> str:
        return str(self._hash.hexdigest())


def memory_of(piece: Tensor) -> memoryview:
    return memoryview(piece.numpy())  # type: ignore[arg-type]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as uint8, sharing its memory."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def tensor_pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of these tensors as uint8 on the CPU, at most ``PIECE`` each."""
    for tensor in tensors:
        if tensor.numel():
            yield from bytes_of(tensor.detach().cpu().contiguous()).split(PIECE)


def fill_tensors(tensors: Iterable[Tensor], pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each CPU tensor once it is filled with bytes from ``pieces``, which may end anywhere in a tensor."""
    stream, piece = iter(pieces), torch.empty(0, dtype=torch.uint8)
    for tensor in tensors:
        rest = bytes_of(tensor)
        while rest.numel():
            piece = piece if piece.numel() else next(stream)
            count = min(piece.numel(), rest.numel())
            rest[:count] = piece[:count]
            rest, piece = rest[count:], piece[count:]
        yield tensor


def in_pieces(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield pieces of any length as ``PIECE`` bytes each, the last one shorter; each is overwritten by the next."""
    buffer, filled = torch.empty(PIECE, dtype=torch.uint8), 0
    for piece in pieces:
        while piece.numel():
            count = min(PIECE - filled, piece.numel())
            buffer[filled : filled + count] = piece[:count]
            filled, piece = filled + count, piece[count:]
            if filled == PIECE:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]
