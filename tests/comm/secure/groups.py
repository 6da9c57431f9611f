"""Process groups of the backend ``tls`` next to gloo ones, in the workers of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from tests.comm.secure.network import Listener, dialler, throwaway_tls
from thinpipe.comm.group import Group
from thinpipe.comm.secure.mesh import Mesh
from thinpipe.comm.secure.process_group import BACKEND, use


@dataclass
class Joined:
    """One worker's part of a mesh."""

    mesh: Mesh
    listener: Listener
    group: Any
    lines: list[str]


_FIRST = 1_000_000  # numbers of groups that no other test reaches
_serial = [0]


def new_group(gloo: Any, ranks: list[int]) -> Any:
    """Create a group under a number of its own.

    Torch names groups by counting them. The count must stay the same in all workers of the pool, which other tests use.
    """
    count = _world.group_count
    _serial[0] = 1 + max(Group.of(gloo).gather(_serial[0]))
    _world.group_count = _FIRST + _serial[0]
    try:
        return dist.new_group(ranks, backend=BACKEND)
    finally:
        _world.group_count = count


@contextmanager
def joined(gloo: Any, folder: Path, *, patience_s: float = 60) -> Iterator[Joined]:
    """Join the workers of a group by a mesh over TLS; higher ranks dial lower ones."""
    rank, size, lines = gloo.rank(), gloo.size(), list[str]()
    encrypt = throwaway_tls(folder)
    mesh = Mesh(rank, size, patience_s=patience_s, report=lines.append)
    listener = Listener(mesh, encrypt)
    ports = Group.of(gloo).gather(listener.port)
    for peer in range(size):
        if peer != rank:
            mesh.pair(peer, dialler(rank, ports[peer], encrypt) if peer < rank else None)
    Group.of(gloo).barrier()
    mesh.start()
    use(mesh)
    group = new_group(gloo, list(range(size)))
    try:
        yield Joined(mesh, listener, group, lines)
    finally:
        dist.destroy_process_group(group)
        mesh.close(30)
        listener.close()
        for control in mesh.control_sockets().values():
            control.close()
