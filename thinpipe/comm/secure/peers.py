"""Known peers: the keys that were admitted by a ticket once, and are admitted by themselves later.

One JSON file, written atomically under the lock of its folder; every call reads it, since `thinpipe peers --remove` in
another process must take effect at once.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from thinpipe.comm.secure.identity import fingerprint_bytes, fingerprint_text, home, locked, write_private
from thinpipe.system.files import errors_named, read_json
from thinpipe.system.sanitize import one_line

_FILE = "peers.json"
_NAME_LENGTH = 100  # a peer may choose its name


@dataclass(frozen=True)
class KnownPeer:
    """A peer: its name, and when it was admitted for the first and for the last time, in UTC."""

    name: str
    since: str
    seen: str


class KnownPeers:
    """The peers that this machine knows, by fingerprint; ``folder`` is that of the key by default."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = home() if folder is None else folder
        self.path = self._folder / _FILE

    def __contains__(self, fingerprint: bytes) -> bool:
        return fingerprint in self.read()

    @property
    def names(self) -> dict[bytes, str]:
        return {fingerprint: peer.name for fingerprint, peer in self.read().items()}

    def remember(self, fingerprint: bytes, name: str | None = None) -> None:
        """Add a peer, or note that it was seen; ``name`` is kept if none is given."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with locked(self._folder):
            peers = self.read()
            known = peers.get(fingerprint)
            if name is None:
                name = known.name if known else "unnamed"
            peers[fingerprint] = KnownPeer(one_line(name)[:_NAME_LENGTH], known.since if known else now, now)
            self._write(peers)

    def forget(self, fingerprint: bytes) -> None:
        """Remove a peer, if it is known."""
        with locked(self._folder):
            peers = self.read()
            if peers.pop(fingerprint, None):
                self._write(peers)

    def read(self) -> dict[bytes, KnownPeer]:
        """Return all peers; raise ValueError if the file is damaged."""
        if not os.path.lexists(self.path):
            return {}
        found = read_json(self.path, "the list of known peers")
        with errors_named(self.path, "the list of known peers", "correct it, or remove it: all peers need new tickets"):
            return {
                fingerprint_bytes(text): KnownPeer(**{name: one_line(str(peer[name])) for name in _FIELDS})
                for text, peer in found["peers"].items()
            }

    def _write(self, peers: dict[bytes, KnownPeer]) -> None:
        rows = {fingerprint_text(fingerprint): asdict(peer) for fingerprint, peer in peers.items()}
        write_private(self.path, json.dumps({"peers": rows}, indent=1).encode())


_FIELDS = tuple(KnownPeer.__dataclass_fields__)
