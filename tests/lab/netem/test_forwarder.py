"""The forwarder with sockets for devices and a clock of its own: rates, queues, delays, losses, all to the packet."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from thinpipe.lab.netem import forwarder
from thinpipe.lab.netem.forwarder import Forwarder, LinkPath, Queue

SIZE = 1500
ADDRESSES = ["10.213.0.1", "10.213.0.2", "10.213.0.3"]


class Lab:
    """Workers that send packets and note when what arrives, in milliseconds."""

    def __init__(self, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(workers)]
        self.ends = [end for end, _ in pairs]
        self._all = [each for pair in pairs for each in pair]
        for each in self._all:
            each.setblocking(False)
        devices = iter([device.fileno() for _, device in pairs])
        monkeypatch.setattr(forwarder, "open_tun", lambda *_: next(devices))
        monkeypatch.setattr(forwarder, "monotonic", lambda: self.now)
        self.now = 100.0

    def start(self, queues: dict[str, Any], paths: list[dict[str, Any]]) -> None:
        names = [str(worker) for worker in range(len(self.ends))]
        usual = {"delay_s": 0.0, "jitter_s": 0.0, "loss": 0.0, "seed": "any"}
        config = {"namespaces": names, "interface": "any", "addresses": ADDRESSES, "queues": queues}
        self.forwarder = Forwarder(config | {"paths": [usual | way for way in paths]})

    def send(self, source: int, target: int, number: int, size: int = SIZE) -> None:
        address = bytes(map(int, ADDRESSES[target].split(".")))
        self.ends[source].send((b"\x45" + bytes(15) + address + number.to_bytes(4)).ljust(size, b"\0"))
        assert self.forwarder.read(self.forwarder.devices[source])

    def arrivals(self) -> list[tuple[float, int, int]]:
        """When, where and which, until nothing is under path."""
        found, began = [], self.now
        while (left := self.forwarder.move_due()) is not None:
            self.now += left
            self.forwarder.move_due()
            for worker, end in enumerate(self.ends):
                while packet := _received(end):
                    found.append((round((self.now - began) * 1e3, 3), worker, int.from_bytes(packet[20:24])))
        return found

    def close(self) -> None:
        for each in self._all:
            each.close()


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(65536)
    except BlockingIOError:
        return b""


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = Lab(3, monkeypatch)
    yield made
    made.close()


def mbit(rate: float, max_wait_s: float = 0.1) -> dict[str, float]:
    return {"bytes_per_s": rate * 1e6 / 8, "max_wait_s": max_wait_s}


def test_every_direction_has_its_rate_and_all_the_delay(lab: Lab) -> None:
    lab.start(
        {"up": mbit(4), "down": mbit(12)},
        [
            {"source": 0, "target": 1, "queues": ["up"], "delay_s": 0.02},
            {"source": 1, "target": 0, "queues": ["down"], "delay_s": 0.02},
        ],
    )
    for number in range(3):
        lab.send(0, 1, number)
        lab.send(1, 0, number)
    assert lab.arrivals() == [  # 3 ms a packet up, 1 ms down
        *((21, 0, 0), (22, 0, 1), (23, 0, 2), (23, 1, 0), (26, 1, 1), (29, 1, 2))
    ]


def test_a_full_queue_drops_the_last_packets(lab: Lab) -> None:
    lab.start({"up": mbit(12, max_wait_s=0.0041)}, [{"source": 0, "target": 1, "queues": ["up"]}])
    for number in range(8):
        lab.send(0, 1, number)
    assert [number for _, _, number in lab.arrivals()] == [0, 1, 2, 3, 4]  # the fifth waits for 4 ms
    lab.send(0, 1, 9)
    assert lab.arrivals() == [(1, 1, 9)]


def test_workers_with_one_interface_share_it(lab: Lab) -> None:
    """Worker 0 and worker 1 both send to worker 2, whose own interface is the narrow one."""
    lab.start(
        {"0 sends": mbit(12), "1 sends": mbit(12), "2 receives": mbit(6)},
        [
            {"source": 0, "target": 2, "queues": ["0 sends", "2 receives"]},
            {"source": 1, "target": 2, "queues": ["1 sends", "2 receives"]},
        ],
    )
    for number in range(2):
        lab.send(0, 2, number)
        lab.send(1, 2, 10 + number)
    assert lab.arrivals() == [(3, 2, 0), (5, 2, 10), (7, 2, 1), (9, 2, 11)]


def test_a_path_without_a_rate_has_only_its_delay(lab: Lab) -> None:
    lab.start({}, [{"source": 0, "target": 1, "queues": [], "delay_s": 0.005}])
    for number in range(3):
        lab.send(0, 1, number)
    assert lab.arrivals() == [(5, 1, 0), (5, 1, 1), (5, 1, 2)]


def test_jitter_keeps_the_order(lab: Lab) -> None:
    lab.start({}, [{"source": 0, "target": 1, "queues": [], "delay_s": 0.01, "jitter_s": 0.01}])
    for number in range(30):
        lab.send(0, 1, number)
    came = lab.arrivals()
    assert [number for _, _, number in came] == list(range(30))
    delays = [at for at, _, _ in came]
    assert delays[0] >= 9.7  # half a tick early at most
    assert delays[-1] <= 20
    assert delays[-1] - delays[0] > 2


def test_losses_are_as_often_as_configured_and_the_same_every_time() -> None:
    def lost(seed: str, loss: float, packets: int = 100_000) -> list[int]:
        path = LinkPath({"queues": [], "delay_s": 0, "jitter_s": 0, "loss": loss, "seed": seed}, {}, -1)
        return [number for number in range(packets) if path.loses()]

    first = lost("0 to 1", 0.01)
    assert first == lost("0 to 1", 0.01) != lost("1 to 0", 0.01)
    assert abs(len(first) - 1000) < 3 * (1000 * 0.99) ** 0.5
    neighbours = sum(later - earlier == 1 for earlier, later in pairwise(first))
    assert abs(neighbours - 10) < 3 * 10**0.5  # whatever happened to the packet before
    assert lost("any", 0.0) == []
    assert len(lost("any", 0.5, 1000)) > 400


def test_packets_of_others_are_left_alone(lab: Lab) -> None:
    lab.start({}, [{"source": 0, "target": 1, "queues": []}])
    lab.ends[0].send(b"\x60" + bytes(59))  # IPv6
    lab.ends[0].send(b"\x45" + bytes(15) + bytes([10, 213, 0, 77]) + bytes(40))
    assert lab.forwarder.read(lab.forwarder.devices[0])
    assert lab.forwarder.move_due() is None
    os.close(lab.ends[2].detach())
    assert lab.forwarder.read(lab.forwarder.devices[2])


def test_an_idle_queue_owes_nothing() -> None:
    queue = Queue(**mbit(12))
    assert queue.leave_at(1.0, SIZE) == pytest.approx(1.001)
    assert queue.leave_at(2.0, SIZE) == pytest.approx(2.001)
