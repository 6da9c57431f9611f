"""Bytes from one worker to another, over the group that carries words: in pieces, of a length both know.

For checkpoints that the client alone keeps. What is received is bytes for a place made beforehand: never an object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.engines.world import World
from thinpipe.training.part import PIECE
from thinpipe.workers.exchange import needing_peers


def send(pieces: Iterable[Tensor], worker: int, world: World) -> None:
    """Send bytes to a worker, which receives as many. ``pieces`` of any length travel as full ones."""
    buffer, filled = torch.empty(PIECE, dtype=torch.uint8), 0
    for piece in pieces:
        while piece.numel():
            taken = min(PIECE - filled, piece.numel())
            buffer[filled : filled + taken] = piece[:taken]
            filled, piece = filled + taken, piece[taken:]
            if filled == PIECE:
                _send(buffer, worker, world)
                filled = 0
    if filled:
        _send(buffer[:filled], worker, world)


def _send(piece: Tensor, worker: int, world: World) -> None:
    with needing_peers(f"sending tensors to worker {worker}"):
        dist.send(piece, group=world.control_group, group_dst=worker)


def receive(count: int, worker: int, world: World) -> Iterator[Tensor]:
    """So many bytes from a worker, piece by piece; each is gone when the next one comes."""
    buffer = torch.empty(min(count, PIECE), dtype=torch.uint8)
    for start in range(0, count, PIECE):
        piece = buffer[: min(PIECE, count - start)]
        with needing_peers(f"receiving tensors from worker {worker}"):
            dist.recv(piece, group=world.control_group, group_src=worker)
        yield piece
