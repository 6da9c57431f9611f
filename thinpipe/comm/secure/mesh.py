"""The mesh: one channel from this worker to each other worker of a run."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from thinpipe.comm.errors import LinkError
from thinpipe.comm.secure.channel import Channel, Connect


class Mesh:
    """All channels of one worker. ``report`` prints a line, about connections that break."""

    def __init__(self, rank: int, size: int, *, patience_s: float, report: Callable[[str], None]) -> None:
        self.rank, self.size = rank, size
        self._patience_s, self._report = patience_s, report
        self._channels: dict[int, Channel] = {}

    def pair(self, peer: int, connect: Connect | None) -> None:
        """Add the channel to a peer.

        ``connect`` returns a new authenticated connection. It raises OSError if another attempt may succeed; an error
        with a true attribute ``final`` ends the pair. None: the peer connects, and ``attach`` is called.
        """
        assert peer in set(range(self.size)) - {self.rank} - self._channels.keys()
        self._channels[peer] = Channel(peer, connect, patience_s=self._patience_s, report=self._report)

    def attach(self, peer: int, connection: ssl.SSLSocket) -> None:
        """Continue with a new authenticated connection to a peer, the first or a later one."""
        self._channels[peer].attach(connection)

    def start(self) -> None:
        """Connect all pairs; raise LinkError if one is lost, at the latest after the patience."""
        assert len(self._channels) == self.size - 1
        for channel in self._channels.values():
            channel.start()
        for channel in self._channels.values():
            error = channel.await_connection()
            if error is not None:
                raise LinkError(error)

    def fail(self, peer: int, error: str) -> None:
        """End the pair with a peer that has ended, as is known from elsewhere."""
        self._channels[peer].fail(error)

    def abort(self, error: str) -> None:
        """End all pairs at once: everything that waits for a peer fails with this error."""
        for channel in self._channels.values():
            channel.fail(error)

    @property
    def is_idle(self) -> bool:
        """True if all peers have acknowledged everything that was sent to them."""
        return all(channel.session.is_idle for channel in self._channels.values())

    def channel(self, peer: int) -> Channel:
        return self._channels[peer]

    def control_sockets(self) -> dict[int, socket.socket]:
        """Return one end of a socket pair per peer, whose bytes travel in the channel, ahead of messages.

        They are for ``control.Control``: the line with the cause precedes the end of file if the pair is lost.
        """
        return {peer: channel.control for peer, channel in self._channels.items()}

    def close(self, limit_s: float | None = None) -> None:
        """Close all channels once the peers have acknowledged everything, at the latest after the limit.

        Also after an error: what ``Control`` has announced is sent. ``limit_s``: by default the patience.
        """
        for channel in self._channels.values():
            channel.leave()
        for channel in self._channels.values():
            channel.close(self._patience_s if limit_s is None else limit_s)
