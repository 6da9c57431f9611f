"""The rendezvous of workers: the store, and the connections of the control channel.

    worker 0, the client                                   worker 1 ...
    (1)  creates the store: a file on one machine,         waits until it exists
         a port of the client on several
    (2)  listens, writes address and a secret into it      reads them, connects, sends a hello with the secret
    (3)  waits for all hellos, then answers them           waits for the answer

The secret rejects accidental connections, not attackers: every process that reaches the store can read it. A missing
worker is reported after WARN_S; after ``--patience`` seconds it is an error.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, Queue
from typing import Any, TypeVar, cast

import torch.distributed as dist

from thinpipe.comm.acceptor import Acceptor
from thinpipe.comm.addresses import address_and_port, address_towards, listen
from thinpipe.comm.control import WARN_S
from thinpipe.comm.errors import LinkError, WorkerError
from thinpipe.options import named
from thinpipe.system.sanitize import one_line

_KEY = "thinpipe/control"
_HELLO_BYTES, _HELLO_S = 200, 1.0  # the longest hello, and how long one may take
_BACKLOG = 256  # connections not accepted yet
_POLL_S = 0.2
_GIVE_UP_S = 3.0
_MISSING, _MISSING_BYTES = b"-", 1000  # marks a message about missing workers, and its maximal length

T = TypeVar("T")


class Patience:
    """A timeout that reports waiting after WARN_S, at twice that and so on, and raises an error at its end."""

    def __init__(self, seconds: float, report: Callable[[str], None]) -> None:
        self._seconds, self._report = seconds, report
        self._began, self._next = time.monotonic(), WARN_S

    def left(self) -> float:
        return self._began + self._seconds - time.monotonic()

    def wait(self, problem: str, remedy: str, grace_s: float = 0.0) -> None:
        """Return while there is time left, report long waits, then raise LinkError; call it in a polling loop."""
        waited = time.monotonic() - self._began
        if waited >= self._seconds + grace_s:
            raise LinkError(f"{problem}, {waited:.0f} s after the start: {remedy}")
        if waited >= self._next:
            self._report(f"{problem}, {waited:.0f} s after the start")
            self._next *= 2

    def retry(self, attempt: Callable[[], T], explain: Callable[[OSError], tuple[str, str]]) -> T:
        """Return what ``attempt`` returns; after an OSError, try again while there is time left.

        ``explain`` returns the problem and the remedy.
        """
        while True:
            try:
                return attempt()
            except OSError as error:
                self.wait(*explain(error))
            time.sleep(_POLL_S)


def bounded(call: Callable[[], T], patience: Patience) -> T:
    """Return what a call returns, or raise LinkError on timeout: calls of torch's store can block."""
    results: Queue[tuple[T | None, BaseException | None]] = Queue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="thinpipe-rendezvous", daemon=True).start()
    try:
        result, error = results.get(timeout=max(patience.left(), 0) + 2 * _GIVE_UP_S)  # longer than the call's own
    except Empty:
        raise LinkError(
            "what answers at the address of worker 0 does not go on: look at the port, and for an error of worker 0"
        ) from None
    if error is not None:
        raise error
    return cast("T", result)


def own_address_towards(host: str, patience: Patience) -> str:
    """Return the local address used to reach worker 0; wait until its name resolves and a route exists."""

    def explain(error: OSError) -> tuple[str, str]:
        if isinstance(error, socket.gaierror):
            remedy = named("correct {master}, or give the IP address of worker 0 in place of the name")
            return f"the name {host} of worker 0 cannot be resolved ({error.strerror})", remedy
        remedy = "look at the interfaces and routes of this machine (ip address, ip route)"
        return f"there is no route to worker 0 at {host} ({error.strerror})", remedy

    return patience.retry(lambda: address_towards(host), explain)


@dataclass(frozen=True)
class MasterStore:
    """The store of workers that were started by hand on several machines, and its listening socket."""

    store: dist.Store
    listener: int | None = None  # a file descriptor owned by torch; on the client only

    def stop_listening(self) -> None:
        """Close the port when all workers are connected: no other connection is expected."""
        if self.listener is not None:
            # Torch has no call for this. An unconnected socket takes over the descriptor: the listening socket closes,
            # and the kernel removes it from the event loop of torch.
            with socket.socket() as unconnected:
                os.dup2(unconnected.fileno(), self.listener, inheritable=False)


def make_store(rank: int, size: int, host: str, port: int, patience: Patience) -> MasterStore:
    """Create the store of the client, or connect to it, on several machines, (1)."""
    address = address_and_port(host, port)
    # libuv: it reads available bytes and allocates no more than that. Torch's other backend blocks until the message of
    # a stranger is complete, and allocates whatever length it claims.
    options: dict[str, Any] = {"wait_for_workers": False, "use_libuv": True}
    if rank == 0:
        try:
            # Torch binds to all interfaces; a socket that is already bound keeps its address.
            listener = listen(host, port).detach()
        except OSError as error:
            # Python adds the address to the system's message, except for names.
            why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise WorkerError(
                f"cannot listen at {address}, where the others look for worker 0: {why}. "
                "Name an address of this machine and a free port",
                code=2,
            ) from None
        return MasterStore(
            dist.TCPStore(host, port, size, is_master=True, master_listen_fd=listener, **options), listener
        )
    remedy = "start it there with rank 0, and let this machine through its firewall"
    _connect(host, port, patience, remedy).close()
    timeout = timedelta(seconds=max(patience.left(), 1))
    try:
        return MasterStore(dist.TCPStore(host, port, size, is_master=False, timeout=timeout, **options))
    except RuntimeError as error:
        raise LinkError(
            f"what answers at {address} is not worker 0 ({one_line(str(error))[:200]}): look at the port"
        ) from None


def connect_control(
    store: dist.Store, rank: int, size: int, address: str, patience: Patience
) -> dict[int, socket.socket]:
    """Return the connections of the control channel, by the worker at the other end, (2) and (3)."""
    if size == 1:
        return {}
    if rank == 0:
        return _receive_all(store, size, address, patience)
    while not store.check([_KEY]):
        patience.wait("worker 0 has not come", "look for its error")
        time.sleep(_POLL_S)
    try:
        facts: Any = json.loads(store.get(_KEY))
        host, port = str(facts["host"]), int(facts["port"])
        hello = json.dumps({"worker": rank, "secret": str(facts["secret"])}).encode() + b"\n"
    except (ValueError, KeyError, TypeError, RecursionError):
        raise LinkError("the store of worker 0 has no address of it: something else writes to its port") from None
    remedy = "let this machine through its firewall, or name the right interface in GLOO_SOCKET_IFNAME"
    connection = _connect(host, port, patience, remedy)
    while (answer := _send_hello(connection, hello, patience)) == b"":
        # Worker 0 drops the oldest connections when it has too many: this one's hello may not have arrived yet.
        connection.close()
        patience.wait("worker 0 closes the connection", f"is there another worker {rank}?", _GIVE_UP_S)
        time.sleep(_POLL_S)
        try:
            connection = _open(host, port, patience)
        except OSError:
            raise LinkError("worker 0 has gone while workers were still missing; look for its error") from None
    if answer == _MISSING:
        raise LinkError(_line(connection))
    return {0: connection}


def _send_hello(connection: socket.socket, hello: bytes, patience: Patience) -> bytes:
    """Send the hello and return the answer: a line end, _MISSING, or nothing if the connection is closed."""
    try:
        connection.sendall(hello)
        connection.settimeout(_POLL_S)
        while True:
            try:
                return connection.recv(1)
            except TimeoutError:
                # Wait longer than worker 0, which sends the list of missing workers.
                patience.wait("not all workers have come", "start them, or wait longer", _GIVE_UP_S)
    except ConnectionError:
        return b""


def _receive_all(store: dist.Store, size: int, address: str, patience: Patience) -> dict[int, socket.socket]:
    secret, found = secrets.token_hex(16), dict[int, socket.socket]()
    with listen(address, 0, backlog=_BACKLOG) as listener:
        acceptor = Acceptor(listener, lambda received: received.endswith(b"\n"), _HELLO_BYTES, _HELLO_S)
        store.set(_KEY, json.dumps({"host": address, "port": listener.getsockname()[1], "secret": secret}))
        try:
            while len(found) < size - 1:
                for accepted in acceptor.poll():
                    worker = _worker_of(accepted.first, secret)
                    if worker is None or not 0 < worker < size or worker in found:
                        accepted.connection.close()  # a stranger, or a duplicate worker
                    else:
                        found[worker] = accepted.connection
                _wait_for_missing(found, size, patience)
        finally:
            acceptor.close()
    for connection in found.values():
        connection.sendall(b"\n")
    return found


def _wait_for_missing(found: dict[int, socket.socket], size: int, patience: Patience) -> None:
    missing = [str(worker) for worker in range(1, size) if worker not in found]
    if not missing:
        return
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


def _line(connection: socket.socket) -> str:
    """Return the message of worker 0 about missing workers."""
    line = b""
    connection.settimeout(_HELLO_S)
    with suppress(OSError):
        while not line.endswith(b"\n") and len(line) < _MISSING_BYTES and (received := connection.recv(_MISSING_BYTES)):
            line += received
    return one_line(line[:_MISSING_BYTES].decode(errors="replace")) or "worker 0 has given up"


def _worker_of(hello: bytes, secret: str) -> int | None:
    """Return the rank in a hello with the right secret; None for any other hello."""
    try:
        facts: Any = json.loads(hello)
        known = hmac.compare_digest(str(facts["secret"]).encode(), secret.encode())
        return int(facts["worker"]) if known else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _connect(host: str, port: int, patience: Patience, remedy: str) -> socket.socket:
    """Return a connection to worker 0; wait until it listens."""
    address = one_line(address_and_port(host, port))
    return patience.retry(
        lambda: _open(host, port, patience),
        lambda error: (f"worker 0 does not answer at {address} ({error.strerror or error})", remedy),
    )


def _open(host: str, port: int, patience: Patience) -> socket.socket:
    return socket.create_connection((host, port), timeout=max(min(patience.left(), 5.0), _POLL_S))
