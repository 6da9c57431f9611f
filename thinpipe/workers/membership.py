"""Which worker of a run this process is, as torchrun or ``become_member`` tell it; and how it meets the others.

    worker 0, the client                                   worker 1 ...
    (1)  makes the store: a file on one machine,           looks for it until it is there
         a port of the client on several
    (2)  listens, writes address and a secret into it      reads them, connects, says the secret
    (3)  waits until all have come, tells them             waits for that word

Who is missing is said after WARN_S, and is an error after the patience that the user has.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinpipe.options import OptionError
from thinpipe.workers.control import ACTIVITY, WARN_S, Control
from thinpipe.workers.errors import LinkError, note_cause
from thinpipe.workers.exchange import needing_peers

PATIENCE_S = 60.0  # by default: how long a silent worker is waited for

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>
_KEY = "thinpipe/control"
_HELLO_BYTES, _HELLO_S = 200, 5.0  # what a stranger may send, and how long it may take
_POLL_S = 0.2
_GIVE_UP_S = 3.0
_MISSING, _MOST_SAID = b"-", 1000  # before words about who has not come, and how long they may be

Say = Callable[[str], None]


@dataclass(frozen=True)
class Member:
    """A worker among the others."""

    rank: int
    size: int
    local_rank: int  # among the workers of its machine
    local_size: int
    machine: int = 0


def member() -> Member | None:
    """Which worker this process is; None where it is none: workers are still to be started."""
    if any(name not in os.environ for name in _REQUIRED):
        return None
    return Member(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        machine=int(os.environ.get("GROUP_RANK", "0")),
    )


def become_member(rank: int, size: int, master: str) -> None:
    """Make this process one of the workers of a run on several machines, started by hand on each.

    ``master`` is HOST:PORT, where worker 0 listens and the others look for it.
    """
    host, colon, port = master.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise OptionError(f"{{master}} is an address and a port of worker 0, as in 10.0.0.1:29400; got {master!r}")
    if not 0 <= rank < size:
        raise OptionError(
            f"{{rank}} is the number of this worker, from 0 to {size - 1} with {size} workers; got {rank}"
        )
    set_member(rank, size, machine=rank, local=(0, 1), master=(host.strip("[]"), port))


def set_member(rank: int, size: int, *, machine: int, local: tuple[int, int], master: tuple[str, str]) -> None:
    """In the environment, as torchrun does it. ``local``: number and count among the workers of this machine."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "GROUP_RANK": str(machine),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
    }


def say(words: str) -> None:
    print(f"thinpipe: {words}", file=sys.stderr, flush=True)


@contextmanager
def joined(
    backend: str | None = None,
    *,
    meeting_file: str | None = None,
    patience_s: float = PATIENCE_S,
    end: Callable[[str], Any],
) -> Iterator[Control]:
    """The process group that the environment describes, and the control channel beside it.

    Args:
        backend: by default NCCL where every worker of this machine has a GPU of its own, gloo otherwise.
        meeting_file: in which the workers of one machine find each other, instead of over a network.
        patience_s: how long a worker that is missing or silent is waited for.
        end: ends this process with words about why; called by a thread.
    """
    me = member()
    assert me is not None
    own_gpu = torch.cuda.device_count() >= me.local_size
    if own_gpu:
        torch.cuda.set_device(me.local_rank)
    if "OMP_NUM_THREADS" not in os.environ:  # every worker taking every core is slower than each taking its share
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // me.local_size))
    # Workers of one machine share a terminal: one of those who wait for the client is enough.
    quiet = meeting_file is not None and me.rank > 1
    tell: Callable[[str], None] = (lambda words: None) if quiet else say
    patience = Patience(patience_s, tell)
    store = _find_store(me, meeting_file, patience)
    connections = meet(store, me.rank, me.size, own_address(), patience)
    control = Control(me.rank, connections, patience_s=patience_s, say=tell, end=end)
    ACTIVITY.note("connecting to the other workers")
    # Torch then waits until all are connected: one that had nothing to do would leave while others still connect to it.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    try:
        with needing_peers("connecting"):
            chosen = backend or ("nccl" if _all_have(own_gpu, store, me) else "gloo")
            dist.init_process_group(chosen, store=store, rank=me.rank, world_size=me.size)
        ACTIVITY.note("starting")
        yield control
    except BaseException as error:
        # The group stays: the others would see this worker leave before it says why.
        cause = control.first_cause(error)
        control.announce(cause)
        note_cause(error, cause)
        raise
    dist.destroy_process_group()
    control.close()


def _find_store(me: Member, meeting_file: str | None, patience: Patience) -> dist.Store:
    if meeting_file is not None:
        return dist.FileStore(meeting_file, me.size)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo would ask what this machine's name means, which often is 127.0.0.1 and leads the others nowhere.
        interface = interface_with(address_towards(host))
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store, _, _ = next(
            dist.rendezvous("env://", me.rank, me.size, timeout=timedelta(seconds=max(patience.left(), 1)))
        )
        return store
    return make_store(me.rank, me.size, host, port, patience)


def _all_have(own_gpu: bool, store: dist.Store, me: Member) -> bool:
    """Whether every worker, on whatever machine, has a GPU of its own: all must choose one backend."""
    store.set(f"own gpu {me.rank}", str(int(own_gpu)))
    return all(store.get(f"own gpu {rank}") == b"1" for rank in range(me.size))


def own_address() -> str:
    """Where this worker listens: on the interface that carries the tensors, and on no other."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        return address_of(interface.split(",")[0])
    return address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))


class Patience:
    """Counts how long somebody was waited for: a line after WARN_S, then at twice that and so on, then an error."""

    def __init__(self, seconds: float, say: Say) -> None:
        self._seconds, self._say = seconds, say
        self._began, self._next = time.monotonic(), WARN_S

    def left(self) -> float:
        return self._began + self._seconds - time.monotonic()

    def wait(self, words: str, remedy: str, grace_s: float = 0.0) -> None:
        """Call it again and again; returns while there is patience left."""
        waited = time.monotonic() - self._began
        if waited >= self._seconds + grace_s:
            raise LinkError(f"{words}, {waited:.0f} s after the start: {remedy}")
        if waited >= self._next:
            self._say(f"{words}, {waited:.0f} s after the start")
            self._next *= 2


def make_store(rank: int, size: int, host: str, port: int, patience: Patience) -> dist.Store:
    """(1) The store of workers that were started by hand on several machines: the client has it."""
    address = f"{host}:{port}"
    if rank == 0:
        try:
            listener = socket.create_server((host, port))
        except OSError as error:
            raise ValueError(
                f"worker 0 listens at the address where the others look for it, but cannot at {address}: "
                f"{error.strerror}. Name an address of this machine and a free port"
            ) from None
        # torch binds to all interfaces; a socket that is bound already stays where it is.
        return dist.TCPStore(
            host,
            port,
            size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=False,
        )
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            break
        except OSError as error:
            patience.wait(
                f"worker 0 does not answer at {address} ({error.strerror or error})",
                "start it there with rank 0, and let this machine through its firewall",
            )
            time.sleep(_POLL_S)
    return dist.TCPStore(host, port, size, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))


def meet(store: dist.Store, rank: int, size: int, address: str, patience: Patience) -> dict[int, socket.socket]:
    """(2) and (3): the connections of the control channel, of the client to all and of the others to the client."""
    if size == 1:
        return {}
    if rank == 0:
        return _receive_all(store, size, address, patience)
    while not store.check([_KEY]):
        patience.wait("worker 0 has not come", "look for its error")
        time.sleep(_POLL_S)
    facts = json.loads(store.get(_KEY))
    connection = _connect(facts["host"], facts["port"], patience)
    connection.sendall(json.dumps({"worker": rank, "secret": facts["secret"]}).encode() + b"\n")
    connection.settimeout(_POLL_S)
    while True:
        try:
            word = connection.recv(1)
        except TimeoutError:
            # Longer than worker 0, which knows who is missing and says so.
            patience.wait("not all workers have come", "start them, or wait longer", _GIVE_UP_S)
            continue
        except OSError:
            word = b""
        if word == _MISSING:
            raise LinkError(_line(connection))
        if word != b"\n":
            raise LinkError("worker 0 has gone while workers were still missing; look for its error")
        return {0: connection}


def _receive_all(store: dist.Store, size: int, address: str, patience: Patience) -> dict[int, socket.socket]:
    secret = secrets.token_hex(16)
    found: dict[int, socket.socket] = {}
    with socket.create_server((address, 0), backlog=size + 8) as listener:
        store.set(_KEY, json.dumps({"host": address, "port": listener.getsockname()[1], "secret": secret}))
        listener.settimeout(_POLL_S)
        while len(found) < size - 1:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [str(worker) for worker in range(1, size) if worker not in found]
                who = f"worker {missing[0]} has" if len(missing) == 1 else f"workers {', '.join(missing)} have"
                try:
                    patience.wait(
                        f"{len(found) + 1} of {size} workers are here, {who} not come",
                        "start all workers with the same settings, or wait longer",
                    )
                except LinkError as error:
                    for connection in found.values():
                        with suppress(OSError):
                            connection.sendall(_MISSING + str(error).encode() + b"\n")
                    raise
                continue
            worker = _hello(connection, secret)
            if worker is None or not 0 < worker < size or worker in found:
                connection.close()  # a stranger, or a worker that is here already
            else:
                found[worker] = connection
    for connection in found.values():
        connection.sendall(b"\n")
    return found


def _line(connection: socket.socket) -> str:
    """What worker 0 says before it gives up."""
    heard = b""
    connection.settimeout(_HELLO_S)
    with suppress(OSError):
        while not heard.endswith(b"\n") and len(heard) < _MOST_SAID and (received := connection.recv(_MOST_SAID)):
            heard += received
    return heard[:_MOST_SAID].decode(errors="replace").strip() or "worker 0 has given up"


def _hello(connection: socket.socket, secret: str) -> int | None:
    """The number of a worker that knows the secret."""
    connection.settimeout(_HELLO_S)
    heard = b""
    try:
        while not heard.endswith(b"\n") and len(heard) < _HELLO_BYTES:
            received = connection.recv(_HELLO_BYTES - len(heard))
            if not received:
                return None
            heard += received
        facts: Any = json.loads(heard)
        return int(facts["worker"]) if hmac.compare_digest(str(facts["secret"]), secret) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _connect(host: str, port: int, patience: Patience) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(min(patience.left(), 5.0), _POLL_S))
        except OSError as error:
            patience.wait(
                f"worker 0 does not answer at {host}:{port} ({error.strerror or error})",
                "let this machine through its firewall, or name the right interface in GLOO_SOCKET_IFNAME",
            )
            time.sleep(_POLL_S)


def address_towards(host: str) -> str:
    """The address of this machine that leads to another one."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of UDP: nothing is sent
        return str(probe.getsockname()[0])


def address_of(interface: str) -> str:
    """The IPv4 address of an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def interface_with(address: str) -> str | None:
    """The interface that has an IPv4 address; None where there is none such."""
    for _, name in socket.if_nameindex():
        try:
            if address_of(name) == address:
                return name
        except OSError:  # it has no IPv4 address
            continue
    return None
