"""Thin networks on one machine: workers in network namespaces of their own, joined by links of a given rate.

    two workers     worker 0 |=======================| worker 1
    more            worker 0 |=====| bridge |=====| worker 1
                                            |=====| worker 2 ...

``=`` is a pair of virtual interfaces; ``|`` is an end of it, and lets through what it sends at the rate of the link
(``tc tbf``). So every worker sends and receives at that rate at the same time, as through a cable into a switch. What
crosses is real TCP through the kernel. Needs Linux, root and iproute2.

    with thin_network(100, workers=2) as network:
        run_workers(function, workers=2, network=network)
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from thinpipe.options import OptionError
from thinpipe.workers.membership import member

INTERFACE = "thinpipe"  # of every worker, in a namespace where there is no other but loopback
_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_NAMESPACES = Path("/var/run/netns")  # where iproute2 keeps their names
_CLONE_NEWNET = 0x40000000  # of <sched.h>; Python has os.setns from 3.12 on only

# What may pass at once: three Ethernet frames, so that small messages are shaped, too. The kernel then cuts what TCP
# hands over into frames, which it can do at some hundred Mbit/s; above that a packet of TCP's must fit, and a
# millisecond's worth, so that late timers lose nothing. What may wait: enough that TCP, which keeps a local queue short
# by itself, loses nothing here. Seen with these, from 10 Mbit/s to 1 Gbit/s: no frame lost, 95.5 % of the rate for the
# payload, which is what headers leave of 1514 bytes.
_BURST_BYTES, _FAST_BURST_BYTES, _FAST_BURST_S, _FAST_MBIT = 4608, 70_000, 1e-3, 250
_QUEUE_S, _QUEUE_BYTES = 50e-3, 262_144

# With these, tc takes 136 bit/s to 670 Gbit/s: below, the time of a burst does not fit its 32 bits, and the burst
# shrinks below a frame; above, the queue in bytes does not fit them.
_LEAST_MBIT, _MOST_MBIT = 1e-3, 600e3

_serial = itertools.count()


def parse_link(text: str) -> float | None:
    """The rate of a link in Mbit/s: ``100mbit``, ``1.5gbit``, ``500kbit``; None for ``none``, not shaped at all."""
    if text.strip().lower() == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)?", text.strip().lower())  # without a unit: Mbit/s
    rate = float(match[1]) * _MBIT[match[2] or "mbit"] if match else 0.0
    if not _LEAST_MBIT <= rate <= _MOST_MBIT:
        raise OptionError(
            f"{{link}} is a rate from 1kbit to 600gbit, which tc can shape, as in 100mbit, 1.5gbit; or none; "
            f"got {text[:40]!r}"
        )
    return rate


def parse_links(text: str) -> list[float | None]:
    """Rates separated by commas."""
    return list(dict.fromkeys(parse_link(part) for part in text.split(",")))


def link_text(mbit_per_s: float | None) -> str:
    """The rate as a user writes it; ``parse_link`` reads it."""
    if mbit_per_s is None:
        return "none"
    return f"{mbit_per_s / 1e3:.12g}gbit" if mbit_per_s >= 1e3 else f"{mbit_per_s:.12g}mbit"


def missing_for_networks() -> str | None:
    """What thin networks need and this machine lacks; None where nothing is missing."""
    lacks = [
        *(["Linux"] if not sys.platform.startswith("linux") else ["root"] if os.geteuid() else []),
        *(f"`{command}` of iproute2" for command in ("ip", "tc") if shutil.which(command) is None),
    ]
    return " and ".join(lacks) or None


def check_links(links: Sequence[float | None]) -> None:
    """ValueError where these links cannot be made: found out before a long run, by making one."""
    if any(link is not None for link in links):
        with thin_network(next(filter(None, links)), workers=3):
            pass


def check_launch(workers: Sequence[int], links: Sequence[float | None]) -> None:
    """OptionError where torchrun has started other workers than are asked for, or links there cannot be shaped."""
    me = member()
    if me is None:
        check_links(links)
        return
    if set(workers) != {me.size}:
        asked = ", ".join(map(str, workers))
        raise OptionError(f"torchrun has started {me.size} workers, this would run with {asked}")
    if any(link is not None for link in links):
        raise OptionError("workers on several machines have their links already: leave out {link}")


@dataclass(frozen=True)
class Network:
    """A namespace for every worker, each with an interface into the network."""

    namespaces: tuple[str, ...]

    def enter(self, worker: int) -> None:
        """Move this process into the namespace of a worker: call it before there are threads and sockets.

        Sockets that exist stay where they were opened; threads that exist stay, too. gloo is told its interface.
        """
        with open(_NAMESPACES / self.namespaces[worker]) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {self.namespaces[worker]}")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def command(self, worker: int, *command: str) -> list[str]:
        """The command that runs another one where a worker is."""
        return ["ip", "netns", "exec", self.namespaces[worker], *command]


@contextmanager
def thin_network(mbit_per_s: float | None, workers: int) -> Iterator[Network | None]:
    """A network of so many workers, gone with the context; None for a rate of None, where nothing is shaped.

    Networks of other processes do not see this one. Namespaces of processes that were killed are removed.
    """
    if mbit_per_s is None:
        yield None
        return
    lacks = missing_for_networks()
    if lacks is not None:
        raise OptionError(
            f"{{link}} shapes traffic between network namespaces, which needs Linux, root, and ip and tc of iproute2; "
            f"here is no {lacks}: run as root on such a machine, or leave {{link}} out"
        )
    _remove(name for name in _existing() if not _owner_lives(name))
    prefix = f"thinpipe-{os.getpid()}-{next(_serial)}-"
    names = [f"{prefix}{worker}" for worker in range(workers)]
    with _ending_on_signals():
        try:
            for name in names:
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            if workers == 2:
                _join(names[0], INTERFACE, names[1], INTERFACE, mbit_per_s)
            elif workers > 2:
                hub = f"{prefix}hub"
                _run("ip", "netns", "add", hub)
                _run("ip", "-n", hub, "link", "add", "bridge", "up", "type", "bridge")
                for worker, name in enumerate(names):
                    _join(name, INTERFACE, hub, f"port{worker}", mbit_per_s)
                    _run("ip", "-n", hub, "link", "set", f"port{worker}", "master", "bridge")
            for worker, name in enumerate(names if workers > 1 else []):
                high, low = divmod(worker + 1, 250)
                _run("ip", "-n", name, "address", "add", f"10.213.{high}.{low}/16", "dev", INTERFACE)
            yield Network(tuple(names))
        finally:
            _remove(name for name in _existing() if name.startswith(prefix))


def _join(here: str, my_end: str, there: str, its_end: str, mbit_per_s: float) -> None:
    """A pair of interfaces between two namespaces, shaped at both ends."""
    _run("ip", "link", "add", my_end, "netns", here, "type", "veth", "peer", "name", its_end, "netns", there)
    bytes_per_s = mbit_per_s * 1e6 / 8
    fast = mbit_per_s > _FAST_MBIT
    burst = max(_FAST_BURST_BYTES, int(bytes_per_s * _FAST_BURST_S)) if fast else _BURST_BYTES
    limit = burst + max(int(bytes_per_s * _QUEUE_S), _QUEUE_BYTES)
    for namespace, end in ((here, my_end), (there, its_end)):
        _run("tc", "-n", namespace, "qdisc", "add", "dev", end, "root", "tbf",
             "rate", f"{round(mbit_per_s * 1e6)}bit", "burst", str(burst), "limit", str(limit))  # fmt: skip
        _run("ip", "-n", namespace, "link", "set", end, "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OptionError(
            f"{{link}} makes network namespaces and shapes traffic between them, which this machine does not allow: "
            f"{' '.join(command)}: {done.stderr.strip()}"
        )


def _existing() -> list[str]:
    """Namespaces that thinpipe made."""
    return [path.name for path in _NAMESPACES.glob("thinpipe-*")]


def _owner_lives(name: str) -> bool:
    match = re.match(r"thinpipe-(\d+)-", name)
    if match is None:
        return True
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _remove(names: Iterator[str]) -> None:
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # an impatient second Ctrl-C must not leave half
    try:
        for name in names:
            # Another process may have removed a dead one's already.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as an exception would, so that what it made is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    taken = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
