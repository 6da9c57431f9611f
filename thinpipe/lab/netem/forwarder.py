"""The forwarder process of an emulated network: forwards packets between workers, and removes the network at its end.

    stdin     one line of JSON, the configuration; none if the kernel shapes the links; closed when the launcher dies
    stdout    "ready", or one line with the error; closed when this process ends, which the launcher detects

A packet from worker a to worker b:

    (1)  is read from a's TUN device, and dropped with the probability of loss
    (2)  passes the queues on its path, one after the other: a queue forwards packets in order at its rate, and drops
         packets when it is full, as a router does
    (3)  is written to b's TUN device after the delay, never before a packet that was sent earlier

Runs as a script that imports nothing of thinpipe: it starts in some hundredths of a second and uses a few MB.
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

NAMESPACES = "/var/run/netns"  # iproute2's directory of named network namespaces
CLONE_NEWNET = 0x40000000  # from <sched.h>; os.setns needs Python 3.12
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # from <linux/if_tun.h>
_PACKET_BYTES = 65_536
_BATCH = 32  # packets read from one worker before the next worker's
# Polling interval, so that the process does not wake for each packet: at 100 Mbit/s one comes every 0.12 ms. Longer for
# long delays: every wake-up takes time from workers, which share the cores (at 0.3 ms 6 to 10 % of one core).
_TICK_S, _LONGEST_TICK_S, _TICKS_OF_DELAY = 0.3e-3, 1e-3, 20


class Queue:
    """A FIFO queue of limited length that forwards packets at a rate."""

    def __init__(self, bytes_per_s: float, max_wait_s: float) -> None:
        self.bytes_per_s, self.max_wait_s = bytes_per_s, max_wait_s
        self.free_at = 0.0

    def leave_at(self, now: float, size: int) -> float | None:
        """Return the time at which a packet that arrives now has left; None if the queue is full."""
        begins = max(self.free_at, now)
        if begins - now > self.max_wait_s:
            return None
        self.free_at = begins + size / self.bytes_per_s
        return self.free_at


class LinkPath:
    """The one-path path from one worker to another: queues, delay, jitter and loss."""

    def __init__(self, config: dict[str, Any], queues: dict[str, Queue], device: int) -> None:
        self.queues = [queues[name] for name in config["queues"]]
        self.delay_s, self.jitter_s, self.device = config["delay_s"], config["jitter_s"], device
        self.last_at = 0.0
        self._loss = config["loss"]
        self._random = random.Random(config["seed"])
        self.until_lost = self._gap()  # number of packets until the next lost one

    def _gap(self) -> float:
        """Return the number of packets until the next loss: geometrically distributed, so losses are independent."""
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
    """The TUN devices, the paths between them, and the packets in flight."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.devices = [open_tun(name, config["interface"]) for name in config["namespaces"]]
        queues = {name: Queue(**facts) for name, facts in config["queues"].items()}
        addresses = [bytes(map(int, address.split("."))) for address in config["addresses"]]
        # By source device and target address.
        self._paths: dict[int, dict[bytes, LinkPath]] = {device: {} for device in self.devices}
        for path in config["paths"]:
            source, target = self.devices[path["source"]], self.devices[path["target"]]
            self._paths[source][addresses[path["target"]]] = LinkPath(path, queues, target)
        least = min((path["delay_s"] for path in config["paths"]), default=0.0)
        self.tick_s = min(max(least / _TICKS_OF_DELAY, _TICK_S), _LONGEST_TICK_S)
        self._due: list[tuple[float, int, LinkPath, int, bytes]] = []  # time, order of arrival, path, queues passed
        self._count = 0

    def move_due(self) -> float | None:
        """Do (2) and (3) for all packets that are due; return the seconds until the next one is."""
        due, now = self._due, monotonic()
        soon = now + self.tick_s / 2  # packets are early as often as late
        while due and due[0][0] <= soon:
            at, _, path, passed, packet = heappop(due)
            if passed < len(path.queues):
                self._enter(at, path, passed, packet)
            else:
                with suppress(OSError):  # the device is down, like an unplugged cable
                    os.write(path.device, packet)
        return max(due[0][0] - now, 0.0) if due else None

    def read(self, device: int) -> bool:
        """Do (1) for the packets that wait at a device; return False if the device is gone."""
        paths = self._paths[device]
        for _ in range(_BATCH):
            try:
                packet = os.read(device, _PACKET_BYTES)
            except BlockingIOError:
                break
            except OSError:
                return False
            path = paths.get(packet[16:20]) if packet[0] >> 4 == 4 else None  # the kernel also solicits IPv6 routers
            if path is not None and not path.loses():
                self._enter(monotonic(), path, 0, packet)
        return True

    def _enter(self, now: float, path: LinkPath, passed: int, packet: bytes) -> None:
        """Put a packet into the next queue on its path, or schedule its arrival after the last one."""
        left_at = path.queues[passed].leave_at(now, len(packet)) if passed < len(path.queues) else now
        if left_at is not None:
            at = path.arrive_at(left_at) if passed + 1 >= len(path.queues) else left_at
            self._count += 1
            heappush(self._due, (at, self._count, path, passed + 1, packet))


def open_tun(namespace: str, interface: str) -> int:
    """Open a TUN device in a namespace; it exists as long as this process."""
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


def forward(config: dict[str, Any], launcher: int) -> None:
    """Forward packets until the launcher ends."""
    forwarder = Forwarder(config)
    with suppress(OSError):
        # Real-time priority, as for the kernel's own shaping: otherwise packets would wait for workers that compute.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    send_line("ready")
    watched = [launcher, *forwarder.devices]
    while True:
        sleep(forwarder.tick_s)
        readable = select.select(watched, [], [], forwarder.move_due())[0]
        for device in readable:
            if device == launcher:
                return  # end of file: the launcher has ended
            if not forwarder.read(device):
                watched.remove(device)


def send_line(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def remove_namespaces(prefix: str) -> None:
    """Remove the namespaces whose names begin with ``prefix``, with all devices in them."""
    for name in os.listdir(NAMESPACES) if os.path.isdir(NAMESPACES) else ():
        if name.startswith(prefix):
            quiet = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]  # another process may have removed it
            with suppress(OSError):
                os.waitpid(os.posix_spawnp("ip", ["ip", "netns", "delete", name], os.environ, file_actions=quiet), 0)


def main(prefix: str) -> None:
    """Forward packets as configured on stdin until it is closed, then remove the network."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # workers need the network to stop together
        signal.signal(number, signal.SIG_IGN)
    launcher, line = sys.stdin.fileno(), b""
    while not line.endswith(b"\n") and (more := os.read(launcher, _PACKET_BYTES)):
        line += more
    try:
        if line.endswith(b"\n"):
            forward(json.loads(line), launcher)
    except OSError as error:
        send_line(f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror or error))
    finally:
        remove_namespaces(prefix)


if __name__ == "__main__":
    main(sys.argv[1])
