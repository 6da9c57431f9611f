"""Two sessions joined by a simulated network that can lose the connection after any byte."""

from __future__ import annotations

import random
from collections import deque

from thinpipe.comm.secure.operation import Operation
from thinpipe.comm.secure.session import Session


class Pair:
    """Two ends and the bytes on the way between them. ``move`` is the only thing that takes time."""

    def __init__(self, window: int = 64 << 20, buffer_bytes: int = 64 << 20) -> None:
        self.ends = [Session(f"worker {end}", window=window, buffer_bytes=buffer_bytes) for end in (1, 0)]
        self.ways: list[deque[memoryview]] = [deque(), deque()]  # from each end to the other
        self.moved = 0  # bytes
        self.cut()

    def cut(self) -> None:
        """Lose the connection and all that is on its way; connect again."""
        for end, way in zip(self.ends, self.ways, strict=True):
            way.clear()
            end.connect()

    def move(self, source: int, most: int = 1 << 30) -> int:
        """Deliver up to ``most`` bytes of an end to the other; return how many."""
        end, other, way, count = self.ends[source], self.ends[1 - source], self.ways[source], 0
        while count < most:
            if not way:
                way.extend(end.output())
                if not way:
                    break
            buffer = other.buffer()
            piece = way[0][: min(len(buffer), most - count)]
            buffer[: len(piece)] = piece
            other.received(len(piece))
            count += len(piece)
            way[0] = way[0][len(piece) :]
            if not way[0]:
                way.popleft()
        self.moved += count
        return count

    def settle(self) -> None:
        """Deliver all that can be delivered."""
        moved = True
        while moved:
            for end in self.ends:
                end.acknowledge()
            moved = self.move(0) + self.move(1) > 0


class Program:
    """Messages that both ends send and receive in random orders, and what arrived; tags 0 to 3, streams 0 and 1."""

    def __init__(self, rng: random.Random, pair: Pair, messages: int, longest: int) -> None:
        self.rng, self.pair = rng, pair
        self.sends: list[list[tuple[int, int, bytes]]] = [[], []]
        for _ in range(messages):
            size = rng.choice((0, 1, longest, rng.randint(0, longest)))
            self.sends[rng.randrange(2)].append((rng.randrange(2), rng.randrange(4), rng.randbytes(size)))
        # Receives in the order of the sends of each key, and of keys in any order.
        self.receives: list[list[tuple[int, int, bytes]]] = [[], []]
        for end in (0, 1):
            order = [message[:2] for message in self.sends[1 - end]]
            rng.shuffle(order)
            queues: dict[tuple[int, int], deque[bytes]] = {}
            for stream, tag, data in self.sends[1 - end]:
                queues.setdefault((stream, tag), deque()).append(data)
            self.receives[end] = [(*key, queues[key].popleft()) for key in order]
        self.sent: list[Operation] = []
        self.received: list[tuple[Operation, bytearray, bytes]] = []
        self.left = [deque(self.sends[end]) for end in (0, 1)]
        self.open = [deque(self.receives[end]) for end in (0, 1)]

    def send(self, end: int) -> None:
        if self.left[end]:
            stream, tag, data = self.left[end].popleft()
            memory = bytearray(data)
            operation = self.pair.ends[end].send(stream, tag, memoryview(memory))
            self.sent.append(operation)
            if operation.done:
                memory[:] = bytes(len(memory))  # its sender may use it for something else now

    def receive(self, end: int) -> None:
        if self.open[end]:
            stream, tag, data = self.open[end].popleft()
            memory = bytearray(len(data) + self.rng.randrange(3))
            self.received.append((self.pair.ends[end].receive(stream, tag, memoryview(memory)), memory, data))

    def check(self) -> None:
        """All messages have arrived, once and in order."""
        assert len(self.received) == len(self.sends[0]) + len(self.sends[1])
        for operation, memory, data in self.received:
            assert operation.done
            assert operation.error is None
            assert bytes(memory[: operation.at]) == data
        assert all(operation.done and operation.error is None for operation in self.sent)
