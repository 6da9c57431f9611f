"""Probe of a link before any transfer: round-trip time, and loss and rate of both directions.

    (1)  worker 0 sends small numbered packets (UDP) at a constant rate; worker 1 echoes each
    (2)  worker 0 sends as fast as one connection allows (TCP), then worker 1 does

Packets that do not arrive count as lost; the others give the round-trip time. If a firewall drops all of them, round
trip and losses are None. A rate is measured in the second half, when TCP's congestion window has grown.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from thinpipe.comm.group import Group
from thinpipe.comm.membership import own_address
from thinpipe.lab.records.record import Check, column
from thinpipe.train.shaping import Shaping

_PACKET = struct.Struct("!QQd84x")  # run id, sequence number, time of sending
_WIRE_BYTES = _PACKET.size + 28  # with UDP and IP headers
_MOST_PER_S = 2000
_SHARE = 0.25  # fraction of the link's rate: packets must not queue behind each other
_ANSWER_S = 1.0  # timeout for the last echoes, in addition to four round trips
_BUFFER_BYTES = 4 << 20
_POLL_S = 0.05
_PIECE = bytes(1 << 16)
# Tolerances of a shaped link: headers take up to 4.5 % of a rate, and timers are sometimes late.
_RATE_OFF, _TRIP_OFF_MS, _ERRORS_OFF = 0.07, 2.0, 3.0
_NO_LOSS = 1e-9  # the standard error if no loss is configured
_TRIPS = 40  # minimum length of a stream in round trips: TCP's slow start doubles the rate in each


@dataclass(frozen=True, kw_only=True)
class Probed:
    """The measurements of one link; down is from worker 1 to worker 0, up is the reverse."""

    round_trip_ms: float | None = column("round\ntrip ms", format=".2f", better="lower", default=None)
    packets: int | None = column("packets\neach way", format="d", default=None)
    loss_down: float | None = column("loss\ndown", format=".3%", better="lower", default=None)
    loss_up: float | None = column("loss\nup", format=".3%", better="lower", default=None)
    down_mbit_per_s: float | None = column("down\nMbit/s", format=".1f", better="higher", default=None)
    up_mbit_per_s: float | None = column("up\nMbit/s", format=".1f", better="higher", default=None)


def probe(link: Shaping | None, seconds: float, between: Group) -> Probed:
    """Run (1) and (2) with ``seconds`` for each of the three measurements; 0 measures nothing. A collective."""
    if not seconds:
        return Probed()
    echoed = _Packets(link, seconds, between).measure()
    trip_s = (echoed.get("round_trip_ms") or 0.0) / 1e3
    seconds = max(seconds, _TRIPS * trip_s)
    up, down = (_stream(source, seconds, between) for source in (0, 1))
    return Probed(**echoed, down_mbit_per_s=down, up_mbit_per_s=up)


class _Packets:
    """Step (1): round-trip time and losses by UDP packets."""

    def __init__(self, link: Shaping | None, seconds: float, between: Group) -> None:
        self._between, self._seconds = between, seconds
        paths = {} if link is None else link.paths(2)
        rates = [queue.mbit_per_s for path in paths.values() for queue in path.queues if queue.mbit_per_s is not None]
        most = min(rates, default=float("inf")) * 1e6 / 8 * _SHARE / _WIRE_BYTES
        self._gap_s = 1 / min(most, _MOST_PER_S)
        address = own_address()
        self._socket = socket.socket(_family(address), socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._socket.bind((address, 0))
        self._run = time.monotonic_ns()  # filters packets of other senders and of earlier runs
        places = between.gather([*self._socket.getsockname()[:2], self._run])
        (*self._peer, _), self._run = places[1 - between.rank], places[0][2]

    def measure(self) -> dict[str, Any]:
        """Return the measurements on both workers; empty if no packet came back."""
        over = threading.Event()
        with self._socket:
            if self._between.rank == 0:
                sent, trips = self._send()
                self._between.gather(None)
                mine = {"sent": sent, "came": len(trips), "trip_ms": median(trips) * 1e3 if trips else None}
            else:
                arrived: set[int] = set()
                answering = threading.Thread(target=self._answer, args=(over, arrived), daemon=True)
                answering.start()
                self._between.gather(None)  # worker 0 has received all echoes
                over.set()
                answering.join()
                mine = {"came": len(arrived)}
        client, server = self._between.gather(mine)
        if not client["came"]:
            return {}
        return {
            "round_trip_ms": client["trip_ms"],
            "packets": client["sent"],
            "loss_up": 1 - server["came"] / client["sent"],
            "loss_down": 1 - client["came"] / server["came"],
        }

    def _send(self) -> tuple[int, list[float]]:
        """Return the number of packets sent, and the round trips of those that came back, in seconds."""
        trips: dict[int, float] = {}
        began, sent = time.monotonic(), 0
        while (at := began + sent * self._gap_s) < began + self._seconds:
            self._receive(trips, at)
            self._socket.sendto(_PACKET.pack(self._run, sent, time.monotonic()), tuple(self._peer))
            sent += 1
        last = time.monotonic() + _ANSWER_S + 4 * max(trips.values(), default=0.0)
        while len(trips) < sent and time.monotonic() < last:
            self._receive(trips, last)
        return sent, list(trips.values())

    def _receive(self, trips: dict[int, float], until: float) -> None:
        """Receive echoes until the time ``until``."""
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                packet = self._socket.recv(_PACKET.size)
            except TimeoutError:
                return
            except ConnectionRefusedError:
                continue
            run, number, sent_at = _PACKET.unpack(packet) if len(packet) == _PACKET.size else (None, 0, 0.0)
            if run == self._run:
                trips.setdefault(number, time.monotonic() - sent_at)

    def _answer(self, over: threading.Event, arrived: set[int]) -> None:
        self._socket.settimeout(_POLL_S)
        while not over.is_set():
            try:
                packet, sender = self._socket.recvfrom(_PACKET.size)
            except (TimeoutError, ConnectionRefusedError):
                continue
            if len(packet) == _PACKET.size and _PACKET.unpack(packet)[0] == self._run:
                arrived.add(_PACKET.unpack(packet)[1])
                self._socket.sendto(packet, sender)


def check_probed(link: Shaping, probed: Mapping[str, Any]) -> Iterator[Check]:
    """Yield checks that a link between two workers has the configured rates, delay and loss."""
    down, up = link.paths(2)[1, 0], link.paths(2)[0, 1]
    least_ms = 0.0
    for name, path in (("down", down), ("up", up)):
        rate = path.queues[0].mbit_per_s
        least_ms += path.shape.delay_ms
        if rate is not None:
            least_ms += _WIRE_BYTES * 8e-3 / rate
            off = probed[f"{name}_mbit_per_s"] / rate - 1
            yield Check(claim=f"{link.text}: rate {name}", measured=abs(off), limit=_RATE_OFF, detail=f"{off:+.3f}")
    trip_ms = probed["round_trip_ms"]
    most_ms = least_ms + 2 * down.shape.jitter_ms
    off_ms = None if trip_ms is None else max(least_ms - trip_ms, trip_ms - most_ms, 0.0)
    yield Check(claim=f"{link.text}: round trip", measured=off_ms, limit=_TRIP_OFF_MS, unit=" ms")
    for name in ("down", "up"):
        loss, expected, packets = probed[f"loss_{name}"], down.shape.loss, probed["packets"]
        error = None if packets is None else max(math.sqrt(expected * (1 - expected) / packets), _NO_LOSS)
        yield Check(
            claim=f"{link.text}: loss {name}, in standard errors",
            measured=None if error is None else abs(loss - expected) / error,
            limit=_ERRORS_OFF,
            detail=f"{loss}",
        )


def _stream(source: int, seconds: float, between: Group) -> float:
    """Step (2): return the rate of one direction in Mbit/s, on both workers."""
    address, me = own_address(), between.rank
    rate = None
    with socket.create_server((address, 0), family=_family(address)) as listener:
        places = between.gather(list(listener.getsockname()[:2]))
        if me == source:
            with socket.create_connection(tuple(places[1 - source])) as connection:
                ends = time.monotonic() + seconds
                while time.monotonic() < ends:
                    connection.sendall(_PIECE)
        else:
            connection, _ = listener.accept()
            with connection:
                rate = _received_mbit_per_s(connection)
        rates: list[Any] = between.gather(rate)
    return float(rates[1 - source])


def _received_mbit_per_s(connection: socket.socket) -> float:
    buffer, total = bytearray(1 << 18), 0
    seen: list[tuple[float, int]] = []
    while size := connection.recv_into(buffer):
        total += size
        seen.append((time.monotonic(), total))
    middle = (seen[0][0] + seen[-1][0]) / 2
    half = next(each for each in seen if each[0] >= middle)
    return (seen[-1][1] - half[1]) * 8 / max(seen[-1][0] - half[0], 1e-9) / 1e6


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
