"""The mirror: servers send copies of their snapshots to the client, in the gaps of the links.

A piece is sent only while this worker has nothing else under way to any worker: all sent bytes are acknowledged. Pieces
take PIECE_S, so an activation waits that long for one at most. While the run pauses, pieces do not wait.

    server                                                                   client
    size of the description (8 bytes), description (JSON)                ->
    {"snapshot": [1, 20], "tensors": {NAME: [[2, 3], "float32"], ...}}
    the bytes of all tensors, in pieces                                  ->  SnapshotReceiver: stored, then reported
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from thinpipe.comm.errors import LinkError
from thinpipe.comm.secure.channel import ACK_S, Channel
from thinpipe.comm.secure.mesh import Mesh
from thinpipe.comm.streams import bytes_of, fill_tensors, memory_of
from thinpipe.system.tensors import empty_tensor, spec_bytes, specs_of

_STREAM, _TAG = 1 << 62, 0  # of no process group
_LARGEST = 16 << 20  # bytes of a description
_LEAST, _MOST = 16 << 10, 1 << 20  # bytes of a piece
PIECE_S = 0.01
_POLL_S = 0.002
_SHORTEST_S, _FORGET = 1e-3, 0.95

State = dict[str, Tensor]
SnapshotKey = tuple[int, int]


class SnapshotSender:
    """The thread of a server that sends snapshots, until its mesh is closed."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._changed = threading.Condition()
        self._next: tuple[SnapshotKey, State] | None = None
        self._sending: SnapshotKey | None = None
        self._hurries = self._closed = False
        self._piece, self._rate = _LEAST, 0.0  # bytes, and bytes per second
        threading.Thread(target=self._run, name="thinpipe-mirror", daemon=True).start()

    def offer(self, snapshot: SnapshotKey, state: State, *, hurries: bool) -> None:
        """Send a snapshot after the present one; ``hurries``: without waiting for gaps from now on."""
        with self._changed:
            self._hurries |= hurries
            if snapshot != self._sending:
                self._next = snapshot, state
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._sending = None
                    while self._next is None and not self._closed:
                        self._changed.wait()
                    if self._next is None or self._closed:
                        return
                    (self._sending, state), self._next = self._next, None
                self._send_snapshot(self._sending, state)
        except LinkError:  # the attempt has ended
            return

    def _send_snapshot(self, snapshot: SnapshotKey, state: State) -> None:
        description = json.dumps({"snapshot": snapshot, "tensors": specs_of(state)}).encode()
        self._send(memoryview(len(description).to_bytes(8)))
        self._send(memoryview(description))
        rest = torch.cat([bytes_of(tensor.contiguous()) for tensor in state.values()])
        while rest.numel():
            self._await_gap()
            began, size = time.monotonic(), min(self._piece, rest.numel())
            self._send(memory_of(rest[:size]))
            rest = rest[size:]
            self._await_gap()
            # All of it has arrived, perhaps long ago: the highest rate counts.
            rate = size / max(time.monotonic() - began - ACK_S, _SHORTEST_S)
            self._rate = max(rate, _FORGET * self._rate)
            self._piece = round(min(max(self._rate * PIECE_S, _LEAST), _MOST))

    def _await_gap(self) -> None:
        while not (self._hurries or self._closed or self._mesh.is_idle):
            time.sleep(_POLL_S)

    def _send(self, content: memoryview) -> None:
        _complete(self._mesh.channel(0).send(_STREAM, _TAG, content))


class SnapshotReceiver:
    """The thread of the client that receives one server's snapshots, until the mesh is closed.

    ``store(snapshot, state)`` is called with each; ``limit_bytes`` is the most that one may have.
    """

    def __init__(self, channel: Channel, limit_bytes: int, store: Callable[[SnapshotKey, State], None]) -> None:
        self._channel, self._limit_bytes, self._store = channel, limit_bytes, store
        threading.Thread(target=self._run, name="thinpipe-mirror", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._store(*self._receive_snapshot())
        except LinkError:
            return
        except (ValueError, KeyError, TypeError) as error:
            self._channel.fail(f"{self._channel.name} sent no snapshot: {error}")

    def _receive_snapshot(self) -> tuple[SnapshotKey, State]:
        head = bytearray(8)
        self._receive(memoryview(head))
        size = int.from_bytes(head)
        if size > _LARGEST:
            raise ValueError(f"its description has {size} bytes, and {_LARGEST} are the most")
        description = bytearray(size)
        self._receive(memoryview(description))
        facts: Any = json.loads(bytes(description))
        attempt, step = facts["snapshot"]
        specs = facts["tensors"]
        total = sum(spec_bytes(spec) for spec in specs.values())
        if not 0 <= total <= self._limit_bytes:
            raise ValueError(f"it has {total} bytes, and {self._limit_bytes} were expected at most")
        state = {str(name): empty_tensor(spec) for name, spec in specs.items()}
        for _ in fill_tensors(state.values(), self._pieces(total)):
            pass
        return (int(attempt), int(step)), state

    def _pieces(self, total: int) -> Iterator[Tensor]:
        buffer = torch.empty(min(total, _MOST), dtype=torch.uint8)
        while total > 0:
            count = self._receive(memory_of(buffer))
            total -= count
            yield buffer[:count]

    def _receive(self, target: memoryview) -> int:
        operation = self._channel.receive(_STREAM, _TAG, target)
        _complete(operation)
        return operation.at


def _complete(operation: Any) -> None:
    operation.wait()
    if operation.error is not None:
        raise LinkError(operation.error)
