"""Emulated networks on one machine: each worker in its own network namespace, joined by shaped links.

    two workers     worker 0 |=======================| worker 1
    more            worker 0 |=====| bridge |=====| worker 1
                                            |=====| worker 2 ...

``=`` is a veth pair; ``|`` is an end of it, which sends at the rate of the link (``tc tbf``, a token bucket filter). So
each worker sends and receives at that rate at the same time, as through a cable into a switch.

    more than a rate     worker 0 | forwarder | worker 1 ...

``|`` is a TUN device, whose packets a separate process reads, delays and drops: ``forwarder.py``. That process also
removes the network, of either kind, if this process is killed. The traffic is real TCP through the kernel.

    with thin_network(100, workers=2) as network:
        run_workers(function, workers=2, network=network)
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from thinpipe.comm.membership import member
from thinpipe.comm.signals import signals_blocked
from thinpipe.lab.netem import forwarder
from thinpipe.lab.netem.forwarder import CLONE_NEWNET, NAMESPACES
from thinpipe.options import OptionError
from thinpipe.train.shaping import LinkPath, Shaping, shaping_of

INTERFACE = "thinpipe"  # interface of each worker, the only one in its namespace apart from loopback
_TUN = Path("/dev/net/tun")
_TUN_PACKETS = "2000"  # queue length in front of the forwarder: 18 MB at most, 140 ms at 1 Gbit/s

# Burst: three Ethernet frames, so that small messages are shaped, too. The kernel then segments TCP's packets into
# frames, which it can do at some hundred Mbit/s; above that a burst must hold a TCP segment and a millisecond of
# traffic, so that late timers do not reduce the rate. Queue: long enough that TCP, which keeps a local queue short,
# loses nothing here. Measured with these, from 10 Mbit/s to 1 Gbit/s: no frame lost, 95.5 % of the rate for the
# payload, which is what headers leave of 1514 bytes.
_BURST_BYTES, _FAST_BURST_BYTES, _FAST_BURST_S, _FAST_MBIT = 4608, 70_000, 1e-3, 250
_QUEUE_S, _QUEUE_BYTES = 50e-3, 262_144

_serial = itertools.count()


def missing_for_networks(links: Shaping | None = None) -> str | None:
    """Return what this machine lacks to emulate networks, or these links; None if nothing is missing."""
    forwarded = links is not None and links.plain_mbit_per_s is None
    lacks = [
        *(["Linux"] if not sys.platform.startswith("linux") else ["root"] if os.geteuid() else []),
        *(f"`{command}` of iproute2" for command in ("ip", "tc") if shutil.which(command) is None),
        *([str(_TUN)] if forwarded and not _TUN.exists() else []),
    ]
    return " and ".join(lacks) or None


def check_links(several: Sequence[Shaping | None], workers: int = 3) -> None:
    """Raise OptionError if these links cannot be created, by creating one of each kind before a long run."""
    shaped = [links for links in several if links is not None]
    for links in shaped:
        links.check(workers)
    for links in {links.plain_mbit_per_s is None: links for links in reversed(shaped)}.values():
        with thin_network(links, min(workers, 3)):
            pass


def check_launch(workers: Sequence[int], links: Sequence[Shaping | None]) -> None:
    """Raise OptionError if torchrun started another number of workers, or if its links are to be shaped."""
    me = member()
    if me is None:
        check_links(links, max(2, *workers))
        return
    if set(workers) != {me.size}:
        requested = ", ".join(map(str, workers))
        raise OptionError(f"torchrun has started {me.size} workers, this would run with {requested}")
    if any(link is not None for link in links):
        raise OptionError("workers on several machines have their links already: leave out {link}")


@dataclass(frozen=True)
class Network:
    """A network namespace per worker, each with an interface into the network."""

    namespaces: tuple[str, ...]
    broken: int | None = None  # a file descriptor of the creating process: readable when the links are down

    def enter(self, worker: int) -> None:
        """Move this process into a worker's namespace; call it before threads and sockets exist.

        Existing sockets and threads stay in the old namespace. Sets gloo's interface.
        """
        with open(Path(NAMESPACES, self.namespaces[worker])) as namespace:
            _enter(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    @contextmanager
    def visit(self, worker: int) -> Iterator[None]:
        """Enter a worker's namespace and return at the end; sockets and threads created inside stay there.

        So a process can hold process groups over several networks.
        """
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        with open("/proc/thread-self/ns/net") as home:
            self.enter(worker)
            try:
                yield
            finally:
                _enter(home)
                os.environ.pop("GLOO_SOCKET_IFNAME")
                os.environ |= {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}


@contextmanager
def thin_network(links: Shaping | float | None, workers: int) -> Iterator[Network | None]:
    """Create a network of ``workers`` and remove it on exit; yield None if ``links`` is None.

    ``links``: a number is a rate in Mbit/s. Networks of other processes are isolated from this one. The network is
    removed if this process is killed; if its forwarder is killed, too, the next ``thin_network`` removes it.
    """
    if links is None:
        yield None
        return
    links = links if isinstance(links, Shaping) else shaping_of(links)
    lacks = missing_for_networks(links)
    if lacks is not None:
        tun = f", and {_TUN} for more than a rate" if links.plain_mbit_per_s is None else ""
        raise OptionError(
            "{link} shapes traffic between network namespaces, which needs Linux, root, and ip and tc of iproute2"
            f"{tun}; here is no {lacks}: run as root on such a machine, or leave {{link}} out"
        )
    _remove(name for name in _existing() if not _owner_lives(name))
    prefix = f"thinpipe-{os.getpid()}-{next(_serial)}-"
    names = [f"{prefix}{worker}" for worker in range(workers)]
    with _ending_on_signals(), _forwarder_process(prefix) as keeper:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        rate = links.plain_mbit_per_s
        if rate is None:
            _forward(keeper, names, links.paths(workers))
        else:
            _cable(prefix, names, rate)
        for worker, name in enumerate(names if workers > 1 else []):
            _run("ip", "-n", name, "address", "add", f"{_address(worker)}/16", "dev", INTERFACE)
        if rate is None:
            _route(names, links.paths(workers))
        assert keeper.stdout is not None
        yield Network(tuple(names), None if rate is not None else keeper.stdout.fileno())


@contextmanager
def _forwarder_process(prefix: str) -> Iterator[subprocess.Popen[str]]:
    """Start the process that removes a network even if this one is killed; on exit, remove the network."""
    # -I and -S: no user or site modules are imported, so that it starts fast.
    command = [sys.executable, "-I", "-S", forwarder.__file__, prefix]
    with signals_blocked():
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        yield keeper
    finally:
        with signals_blocked():  # a second Ctrl-C must not interrupt the removal
            with suppress(OSError):  # the process was killed
                keeper.stdin.close()
            keeper.wait()
            keeper.stdout.close()
            _remove(name for name in _existing() if name.startswith(prefix))


def _cable(prefix: str, names: Sequence[str], mbit_per_s: float) -> None:
    """Create veth pairs between the workers, with a bridge for more than two."""
    if len(names) == 2:
        _join(names[0], INTERFACE, names[1], INTERFACE, mbit_per_s)
    elif len(names) > 2:
        hub = f"{prefix}hub"
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "bridge", "up", "type", "bridge")
        for worker, name in enumerate(names):
            _join(name, INTERFACE, hub, f"port{worker}", mbit_per_s)
            _run("ip", "-n", hub, "link", "set", f"port{worker}", "master", "bridge")


def _forward(keeper: subprocess.Popen[str], names: Sequence[str], paths: dict[tuple[int, int], LinkPath]) -> None:
    """Create a TUN device per worker and start forwarding between them."""
    queues = {
        queue.name: {"bytes_per_s": queue.mbit_per_s * 1e6 / 8, "max_wait_s": path.max_wait_s(queue)}
        for path in paths.values()
        for queue in path.queues
        if queue.mbit_per_s is not None
    }
    config: dict[str, Any] = {
        "interface": INTERFACE,
        "namespaces": names,
        "addresses": [_address(worker) for worker in range(len(names))],
        "queues": queues,
        "paths": [
            {
                "source": source,
                "target": target,
                "queues": [queue.name for queue in path.queues if queue.name in queues],
                "delay_s": path.shape.delay_ms / 1e3,
                "jitter_s": path.shape.jitter_ms / 1e3,
                "loss": path.shape.loss,
                "seed": f"{source} to {target}",  # losses are reproducible
            }
            for (source, target), path in paths.items()
        ],
    }
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with suppress(BrokenPipeError):
        keeper.stdin.write(json.dumps(config) + "\n")
        keeper.stdin.flush()
    answer = keeper.stdout.readline().strip()
    if answer != "ready":
        raise OptionError(
            "{link} with more than a rate forwards packets between TUN devices, which this machine does not allow: "
            f"{answer or 'the forwarder was killed'}"
        )
    for name in names:
        _run("ip", "-n", name, "link", "set", INTERFACE, "mtu", _largest(paths), "txqueuelen", _TUN_PACKETS, "up")


def _route(names: Sequence[str], paths: dict[tuple[int, int], LinkPath]) -> None:
    """Set the MTU of each pair's route by its rate."""
    for (source, target), path in paths.items():
        if str(path.mtu) != _largest(paths):
            to = f"{_address(target)}/32"
            _run("ip", "-n", names[source], "route", "add", to, "dev", INTERFACE, "mtu", str(path.mtu))


def _largest(paths: dict[tuple[int, int], LinkPath]) -> str:
    return str(max((path.mtu for path in paths.values()), default=1500))


def _address(worker: int) -> str:
    high, low = divmod(worker + 1, 250)
    return f"10.213.{high}.{low}"


def _join(here: str, my_end: str, there: str, its_end: str, mbit_per_s: float) -> None:
    """Create a veth pair between two namespaces, shaped at both ends."""
    _run("ip", "link", "add", my_end, "netns", here, "type", "veth", "peer", "name", its_end, "netns", there)
    for namespace, end in ((here, my_end), (there, its_end)):
        _run("tc", "-n", namespace, "qdisc", "add", "dev", end, "root", *_bucket(mbit_per_s))
        _run("ip", "-n", namespace, "link", "set", end, "up")


def change_rate(owner: int, mbit_per_s: float) -> None:
    """Change the rate of the link between the two workers of the network of process ``owner``."""
    for name in _existing():
        if name.startswith(f"thinpipe-{owner}-"):
            _run("tc", "-n", name, "qdisc", "change", "dev", INTERFACE, "root", *_bucket(mbit_per_s))


def _bucket(mbit_per_s: float) -> list[str]:
    """Return the token bucket filter of a link end, as arguments of tc."""
    bytes_per_s = mbit_per_s * 1e6 / 8
    fast = mbit_per_s > _FAST_MBIT
    burst = max(_FAST_BURST_BYTES, int(bytes_per_s * _FAST_BURST_S)) if fast else _BURST_BYTES
    limit = burst + max(int(bytes_per_s * _QUEUE_S), _QUEUE_BYTES)
    return ["tbf", "rate", f"{round(mbit_per_s * 1e6)}bit", "burst", str(burst), "limit", str(limit)]


def _enter(namespace: IO[str]) -> None:
    """Move this thread into an open network namespace."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace.name}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OptionError(
            f"{{link}} makes network namespaces and shapes traffic between them, which this machine does not allow: "
            f"{' '.join(command)}: {done.stderr.strip()}"
        )


def _existing() -> list[str]:
    """Return the namespaces that thinpipe created."""
    return [path.name for path in Path(NAMESPACES).glob("thinpipe-*")]


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
    with signals_blocked():  # a second Ctrl-C must not interrupt the removal
        for name in names:
            # Another process may have removed it already.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the network is removed."""
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
