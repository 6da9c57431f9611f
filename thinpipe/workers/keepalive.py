"""TCP keepalive on every connection of this process: a peer that is gone without a word is noticed by the kernel."""

from __future__ import annotations

import os
import socket
from pathlib import Path

IDLE_S, INTERVAL_S = 5, 3

_seen: set[tuple[int, str]] = set()  # descriptors that were looked at, with what they were


def keep_alive(patience_s: float) -> None:
    """Set it on the connections that have come since the last call; gloo offers no way to ask for it.

    The kernel gives up on what a peer does not acknowledge within ``patience_s``, and asks one that is silent whether
    it is there. It does not matter how slow the peer's process is: its kernel answers.
    """
    folder = Path("/proc/self/fd")
    if not folder.is_dir():  # not Linux: what the system does by itself must do
        return
    here = set()
    for name in os.listdir(folder):
        try:
            what = os.readlink(folder / name)
        except OSError:  # closed meanwhile
            continue
        if what.startswith("socket:"):
            here.add((int(name), what))
    for descriptor, _ in here - _seen:
        _set(descriptor, patience_s)
    _seen.clear()
    _seen.update(here)


def _set(descriptor: int, patience_s: float) -> None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as peer:
            if peer.type != socket.SOCK_STREAM or peer.family not in (socket.AF_INET, socket.AF_INET6):
                return
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(patience_s / INTERVAL_S)))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(patience_s * 1000))
    except OSError:  # closed meanwhile, or no socket after all
        return
