"""Tickets: one string with the address, the key and a secret of a listener; and the admission of peers by them."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

from thinpipe.comm.addresses import address_and_port
from thinpipe.comm.secure.identity import FINGERPRINT_BYTES
from thinpipe.comm.secure.peers import KnownPeers

SECRET_BYTES = 16
_SCHEME = "thinpipe://"
_CHECKSUM_BYTES = 6  # 54 bytes in all: base64 needs no padding, so that every character counts
_CODE_LENGTH = (FINGERPRINT_BYTES + SECRET_BYTES + _CHECKSUM_BYTES) * 4 // 3
_MOST_SECRETS = 64  # the latest ones; expired ones are kept, to tell their owners so


@dataclass(frozen=True)
class Ticket:
    """An invitation to connect to a listener.

    ``str(ticket)`` is ``thinpipe://HOST:PORT/CODE``. The code has the fingerprint of the listener's key, the secret and
    a checksum of both. The address is not part of the checksum: behind a router the listener does not know by which one
    it is reached, and its owner may put that in; the machine that answers there must have the key.
    """

    host: str
    port: int
    fingerprint: bytes
    secret: bytes = field(repr=False)  # not in logs

    def __str__(self) -> str:
        content = self.fingerprint + self.secret
        code = base64.urlsafe_b64encode(content + _checksum(content)).decode()
        return f"{_SCHEME}{address_and_port(self.host, self.port)}/{code}"

    @staticmethod
    def parse(text: str) -> Ticket:
        """Return the ticket in a string; raise ValueError that names what is wrong, without showing the secret."""
        text = text.strip()
        if re.search(r"\s", text):
            raise ValueError("a ticket has no spaces or line breaks: paste it as one line")
        match = re.fullmatch(rf"{_SCHEME}([^/]*)/(.*)", text)
        if match is None:
            raise ValueError(f"a ticket is {_SCHEME}HOST:PORT/CODE; got {text[:30]!r}: copy all of it")
        host, port = _address(match[1])
        content = _content(match[2])
        return Ticket(host, port, content[:FINGERPRINT_BYTES], content[FINGERPRINT_BYTES:])


def _address(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|([\w.-]+)):([0-9]{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(
            f"a ticket begins with {_SCHEME}HOST:PORT/, with IPv6 addresses in brackets and a port of 1 to 65535; "
            f"got {text[:60]!r}"
        )
    return match[1] or match[2], int(match[3])


def _content(code: str) -> bytes:
    if len(code) != _CODE_LENGTH:
        raise ValueError(
            f"the code of a ticket, after HOST:PORT/, has {_CODE_LENGTH} characters; got {len(code)}: copy all of it"
        )
    if re.fullmatch(r"[A-Za-z0-9_-]*", code) is None:
        raise ValueError("the code of a ticket has letters, digits, - and _ only: a character of this one is damaged")
    decoded = base64.urlsafe_b64decode(code)
    content, checksum = decoded[:-_CHECKSUM_BYTES], decoded[-_CHECKSUM_BYTES:]
    if _checksum(content) != checksum:
        raise ValueError("the checksum of the ticket does not match: a character of its code is wrong, copy it again")
    return content


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(b"thinpipe ticket" + content).digest()[:_CHECKSUM_BYTES]


class Verdict(IntEnum):
    """The answer of the listening side to the proof of a dialler; one byte of the handshake."""

    ADMITTED = 0
    BAD_PROOF = 1
    UNKNOWN = 2
    WRONG_SECRET = 3
    EXPIRED = 4
    EXHAUSTED = 5
    NOT_ALLOWED = 6
    UNEXPECTED = 7
    FAILED = 8


@dataclass
class _Secret:
    value: bytes
    uses: int
    until: float  # of time.monotonic


class Admission:
    """The peers that a listener accepts: known keys, and new ones that prove a secret; limited to ``allowed`` keys."""

    def __init__(self, known: KnownPeers, allowed: Collection[bytes] | None = None) -> None:
        self._known, self._allowed = known, None if allowed is None else frozenset(allowed)
        self._secrets: deque[_Secret] = deque(maxlen=_MOST_SECRETS)
        self._lock = threading.Lock()  # two peers must not share the last use of a secret

    def new_secret(self, uses: int, seconds: float) -> bytes:
        """Return a new secret that admits up to ``uses`` new peers within ``seconds``."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with self._lock:
            self._secrets.append(_Secret(secret, uses, time.monotonic() + seconds))
        return secret

    def admit(self, fingerprint: bytes, name: str, proves: Callable[[bytes], bool] | None) -> Verdict:
        """Decide on a peer that has proved its key, and remember it under ``name`` if it is new.

        ``proves``: returns True if the peer has proved this secret; None if it has tried none. Only a new peer uses up
        a secret: a known one may come again with the same ticket. Raise OSError or ValueError if the file of known
        peers is unusable.
        """
        with self._lock:
            is_known = fingerprint in self._known
            secret = None if is_known else self._proved(proves)
            if isinstance(secret, Verdict):
                return secret
            if self._allowed is not None and fingerprint not in self._allowed:
                return Verdict.NOT_ALLOWED
            if secret is None:
                with suppress(OSError, ValueError):  # a full disk must not keep out a known peer
                    self._known.remember(fingerprint)
            else:
                self._known.remember(fingerprint, name)
                secret.uses -= 1
            return Verdict.ADMITTED

    def _proved(self, proves: Callable[[bytes], bool] | None) -> _Secret | Verdict:
        if proves is None:
            return Verdict.UNKNOWN
        found = [each for each in self._secrets if proves(each.value)]
        if not found:
            return Verdict.WRONG_SECRET
        if time.monotonic() >= found[0].until:
            return Verdict.EXPIRED
        return found[0] if found[0].uses > 0 else Verdict.EXHAUSTED
