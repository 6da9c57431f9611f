"""The desk protocol between the client of a run and the supervisor of a server: JSON messages of bounded length.

The client asks and the server answers, independent of the side that has dialled. Every message is an object with one of
the keys below.

    client                                   server
    {"facts": version of this protocol}      {"facts": ServerFacts}
    {"wait": true}                           none: keeps the connection alive while the client waits for other servers
    {"offer": Offer}                         {"accept": true}
    {"probe": [worker, ...]}                 {"reached": [worker, ...]}: those that it can connect to
    {"start": {"1-2": worker that dials}}    {"end": {"cause": ..., "code": ...}}, when its worker has ended
    {"cancel": reason}                       none
    {"rejoin": run}                          {"rejoined": true}: this is the desk of that run from now on
    {"order": Order}                         {"report": Report}: of recovery, at any time after the start

In place of any answer: {"reject": one line}. Nothing is unpickled, and every field is checked on arrival.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import time
from dataclasses import asdict, dataclass
from typing import Any

from thinpipe.options import from_facts
from thinpipe.system.sanitize import one_line

PROTOCOL = 2  # raised by every incompatible change
LARGEST = 16 << 20  # bytes of a message
_LINE = 2000  # characters of a reason
_HEAD = 4  # bytes of a length
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Rejected(ValueError):
    """The other side rejects the run, or has broken the protocol; the message is for the user."""


class Gone(ConnectionError):
    """The other side has closed the connection, or has been silent for too long."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """Facts about a server, which a client asks for before it offers a run."""

    name: str
    thinpipe: str
    torch: str
    transformers: str
    python: str
    device: str  # cpu or cuda
    memory: int  # bytes that a run may use
    address: str | None = None  # HOST:PORT where other servers can try to reach it


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The description of a run for one server."""

    run: str  # its random id, in hexadecimal
    verb: str
    worker: int
    client: str  # name of its machine
    thinpipe: str
    torch: str
    transformers: str | None  # None: the run needs none
    patience_s: float
    settings: dict
    options: dict
    files: dict
    roster: list

    def __post_init__(self) -> None:
        if not 1 <= self.worker < len(self.roster) <= 4096:
            raise ValueError(f"worker {self.worker} of {len(self.roster)}: a server is one of the workers from 1 on")
        if len(bytes.fromhex(self.run)) != 16 or not 0 < self.patience_s < 1e9:  # false for NaN
            raise ValueError(f"a run has an id of 16 bytes and a patience in seconds, got {self.patience_s}")


class Desk:
    """One end of a desk connection. Not for several threads at once: OpenSSL's connections are not."""

    def __init__(self, channel: socket.socket, peer: str) -> None:
        self.channel, self.peer = channel, peer  # the latter for messages
        self._received = bytearray()
        channel.setblocking(False)

    def send(self, **message: Any) -> None:
        """Send a message; raise Gone if the peer does not take it."""
        data = json.dumps(message).encode()
        if len(data) > LARGEST:
            raise ValueError(f"a message to {self.peer} has at most {LARGEST} bytes, got {len(data)}")
        rest, until = memoryview(len(data).to_bytes(_HEAD) + data), time.monotonic() + 60
        while rest:
            try:
                rest = rest[self.channel.send(rest) :]
            except _NOT_NOW as error:
                self._wait(isinstance(error, ssl.SSLWantReadError), until - time.monotonic())
            except OSError as error:
                raise Gone(f"{self.peer} has closed the connection ({error.strerror or error})") from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next message; raise Gone when there is none in time, Rejected if the peer rejects."""
        until = time.monotonic() + timeout_s
        while (message := self.poll()) is None:
            self._wait(True, until - time.monotonic())
        return message

    def ask(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        """Send a message, and return the answer."""
        self.send(**message)
        return self.receive(timeout_s)

    def poll(self) -> dict[str, Any] | None:
        """Return the next message, if it is complete; raise Gone when the peer has closed the connection."""
        while (message := self._complete()) is None:
            try:
                received = self.channel.recv(1 << 16)
            except _NOT_NOW:
                return None
            except OSError as error:
                raise Gone(f"{self.peer} has closed the connection ({error.strerror or error})") from None
            if not received:
                raise Gone(f"{self.peer} has closed the connection")
            self._received += received
        if "reject" in message:
            raise Rejected(one_line(str(message["reject"])[:_LINE]))
        return message

    def close(self) -> None:
        self.channel.close()

    def fileno(self) -> int:
        return self.channel.fileno()

    def _complete(self) -> dict[str, Any] | None:
        size = int.from_bytes(self._received[:_HEAD])
        if len(self._received) < _HEAD or (size <= LARGEST and len(self._received) < _HEAD + size):
            return None
        try:
            if size > LARGEST:
                raise ValueError(f"it announced {size} bytes, and {LARGEST} are the most")
            message = json.loads(bytes(self._received[_HEAD : _HEAD + size]))
            if not isinstance(message, dict):
                raise ValueError("it is not an object")
        except (ValueError, RecursionError) as error:
            raise Rejected(f"{self.peer} sent no message of the desk protocol: {one_line(str(error))[:200]}") from None
        del self._received[: _HEAD + size]
        return message

    def _wait(self, reads: bool, seconds: float) -> None:
        if seconds <= 0:
            raise Gone(f"{self.peer} does not answer")
        ready = select.poll()
        ready.register(self.channel, select.POLLIN if reads else select.POLLOUT)
        ready.poll(1000 * seconds)


def facts_json(facts: ServerFacts | Offer) -> dict[str, Any]:
    return asdict(facts)


def parse_facts(facts: Any) -> ServerFacts:
    return from_facts(ServerFacts, facts, "the facts of a server")


def parse_offer(facts: Any) -> Offer:
    """Return the offer in a message; raise Rejected unless its fields have the right types."""
    try:
        return from_facts(Offer, facts, "the offer of a client")
    except ValueError as error:
        raise Rejected(str(error)) from None


def reason_of(error: BaseException) -> str:
    """Return an error as the reason of a rejection."""
    return one_line(str(error))[:_LINE]


def version_difference(offer: Offer, here: ServerFacts) -> str | None:
    """Return what differs between the versions of client and server, and must not; None if nothing does.

    The same thinpipe: wire formats and settings. The same minor version of torch: kernels and initial values. The same
    minor version of transformers, if the model is one of it: a model's code.
    """
    differing = []
    for package, parts in (("thinpipe", 3), ("torch", 2), ("transformers", 2)):
        client, server = getattr(offer, package), getattr(here, package)
        if client is not None and client.split("+")[0].split(".")[:parts] != server.split("+")[0].split(".")[:parts]:
            differing.append(f"{package} {client} on the client, {server} on {here.name}")
    return "; ".join(differing) or None
