"""The process beside a thin network: forwards packets between its workers, and removes it if its launcher dies.

    stdin     one line of JSON says what to forward, nothing where the kernel shapes the links; ends with the launcher
    stdout    "ready", or one line that says why not; ends with this process, which is how the launcher hears of it

A packet from worker a to worker b:

    (1)  is read from a's TUN device, and lost if its turn says so
    (2)  passes the queues on its way, one after the other: a queue lets packets through in order at its rate, and
         drops those that find it full, as a router does
    (3)  is written to b's TUN device when the delay is over, never before one that was sent earlier

Run as a script that imports nothing of thinpipe: it starts in some hundredths of a second and holds a few MB.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import random
import select
import signal
import struct
import sys
from contextlib import suppress
from heapq import heappop, heappush
from time import monotonic, sleep
from typing import Any

NAMESPACES = "/var/run/netns"  # where iproute2 keeps their names
CLONE_NEWNET = 0x40000000  # of <sched.h>; Python has os.setns from 3.12 on only
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # of <linux/if_tun.h>
_PACKET_BYTES = 65_536
_BATCH = 32  # packets of one worker before the next one's
# Between two looks at all packets, so that it does not wake for each of them: at 100 Mbit/s one comes every 0.12 ms.
_TICK_S = 0.3e-3


class Queue:
    """What lets packets through at a rate."""

    def __init__(self, bytes_per_s: float, room_s: float) -> None:
        self.bytes_per_s, self.room_s = bytes_per_s, room_s
        self.free_at = 0.0

    def leave_at(self, now: float, size: int) -> float | None:
        """When a packet that comes now will have left; None if there is no room for it."""
        begins = max(self.free_at, now)
        if begins - now > self.room_s:
            return None
        self.free_at = begins + size / self.bytes_per_s
        return self.free_at


class Way:
    """From one worker to another."""

    def __init__(self, told: dict[str, Any], queues: dict[str, Queue], device: int) -> None:
        self.queues = [queues[name] for name in told["queues"]]
        self.delay_s, self.jitter_s, self.device = told["delay_s"], told["jitter_s"], device
        self.last_at = 0.0
        self._loss = told["loss"]
        self._random = random.Random(told["seed"])
        self.until_lost = self._gap()  # packets that pass before the next one is lost

    def _gap(self) -> float:
        """Drawn so that every packet is lost with the same probability, whatever happened to those before."""
        return math.inf if not self._loss else int(math.log(1 - self._random.random()) / math.log(1 - self._loss))

    def loses(self) -> bool:
        if self.until_lost:
            self.until_lost -= 1
            return False
        self.until_lost = self._gap()
        return True

    def arrive_at(self, left_at: float) -> float:
        jitter_s = self._random.random() * self.jitter_s if self.jitter_s else 0.0
        self.last_at = max(self.last_at, left_at + self.delay_s + jitter_s)
        return self.last_at


class Forwarder:
    """Devices, the ways between them, and the packets that are under way."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.devices = [open_tun(name, told["interface"]) for name in told["namespaces"]]
        queues = {name: Queue(**facts) for name, facts in told["queues"].items()}
        addresses = [bytes(map(int, address.split("."))) for address in told["addresses"]]
        # By the device a packet comes from and the address it goes to.
        self._ways: dict[int, dict[bytes, Way]] = {device: {} for device in self.devices}
        for way in told["ways"]:
            source, target = self.devices[way["source"]], self.devices[way["target"]]
            self._ways[source][addresses[way["target"]]] = Way(way, queues, target)
        self._due: list[tuple[float, int, Way, int, bytes]] = []  # when, which came first, queues passed
        self._count = 0

    def move_due(self) -> float | None:
        """(2) and (3) for all packets whose time has come; the seconds until that of the next one."""
        due, now = self._due, monotonic()
        soon = now + _TICK_S / 2  # as many are a little early as are late
        while due and due[0][0] <= soon:
            at, _, way, passed, packet = heappop(due)
            if passed < len(way.queues):
                self._enter(at, way, passed, packet)
            else:
                with suppress(OSError):  # the device is down: a cable that was pulled out
                    os.write(way.device, packet)
        return max(due[0][0] - now, 0.0) if due else None

    def read(self, device: int) -> bool:
        """(1) for what waits at a device; False if that is gone."""
        ways = self._ways[device]
        for _ in range(_BATCH):
            try:
                packet = os.read(device, _PACKET_BYTES)
            except BlockingIOError:
                break
            except OSError:
                return False
            way = ways.get(packet[16:20]) if packet[0] >> 4 == 4 else None  # the kernel also asks for IPv6 routers
            if way is not None and not way.loses():
                self._enter(monotonic(), way, 0, packet)
        return True

    def _enter(self, now: float, way: Way, passed: int, packet: bytes) -> None:
        """A packet comes to the next queue on its way, or to the end of the last."""
        left_at = way.queues[passed].leave_at(now, len(packet)) if passed < len(way.queues) else now
        if left_at is not None:
            at = way.arrive_at(left_at) if passed + 1 >= len(way.queues) else left_at
            self._count += 1
            heappush(self._due, (at, self._count, way, passed + 1, packet))


def open_tun(namespace: str, interface: str) -> int:
    """A TUN device in a namespace; it is there as long as this process is."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as own, open(f"{NAMESPACES}/{namespace}") as its:
        if libc.setns(its.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TUN | _IFF_NO_PI))
        finally:
            libc.setns(own.fileno(), CLONE_NEWNET)
    return device


def forward(told: dict[str, Any], launcher: int) -> None:
    """Until the launcher ends."""
    forwarder = Forwarder(told)
    with suppress(OSError):
        # As the kernel's own shaping does, it goes before workers that compute: else packets would wait for them.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    say("ready")
    watched = [launcher, *forwarder.devices]
    while True:
        sleep(_TICK_S)
        readable = select.select(watched, [], [], forwarder.move_due())[0]
        for device in readable:
            if device == launcher:
                return  # it says nothing more: this is its end
            if not forwarder.read(device):
                watched.remove(device)


def say(words: str) -> None:
    os.write(sys.stdout.fileno(), f"{words}\n".encode())


def remove_namespaces(prefix: str) -> None:
    """Those whose names begin so, with all devices in them."""
    for name in os.listdir(NAMESPACES) if os.path.isdir(NAMESPACES) else ():
        if name.startswith(prefix):
            quiet = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]  # another process may have been faster
            with suppress(OSError):
                os.waitpid(os.posix_spawnp("ip", ["ip", "netns", "delete", name], os.environ, file_actions=quiet), 0)


def main(prefix: str) -> None:
    """Forward what stdin asks for until it ends, then remove the network."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # workers still need it to stop together
        signal.signal(number, signal.SIG_IGN)
    launcher, line = sys.stdin.fileno(), b""
    while not line.endswith(b"\n") and (more := os.read(launcher, _PACKET_BYTES)):
        line += more
    try:
        if line.endswith(b"\n"):
            forward(json.loads(line), launcher)
    except OSError as error:
        say(f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror or error))
    finally:
        remove_namespaces(prefix)


if __name__ == "__main__":
    main(sys.argv[1])
