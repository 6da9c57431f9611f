"""Where the time of a worker goes: computing, and what its ends of links take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from thinpipe.measure.figures import figure


class LinkTimes(Protocol):
    """One direction of one link, in total."""

    @property
    def encode_ms(self) -> float: ...
    @property
    def wait_ms(self) -> float: ...
    @property
    def transfer_ms(self) -> float: ...
    @property
    def decode_ms(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Of one step, or of all workers together in one step."""

    compute_ms: float = figure("compute\nms", format=".1f")
    encode_ms: float | None = figure("encode\nms", format=".1f")
    wait_ms: float | None = figure("wait\nms", format=".1f")  # for a sender that has nothing to send yet
    transfer_ms: float | None = figure("transfer\nms", format=".1f")  # as much of it as computing does not hide
    decode_ms: float | None = figure("decode\nms", format=".1f")


def parts_of(compute_ms: float, sent: Iterable[LinkTimes], received: Iterable[LinkTimes], steps: int) -> Parts:
    """Per step, of totals. Encoding is the sender's; waiting, transfer and decoding are the receiver's."""
    received = list(received)
    return Parts(
        compute_ms=compute_ms / steps,
        encode_ms=sum(link.encode_ms for link in sent) / steps,
        wait_ms=sum(link.wait_ms for link in received) / steps,
        transfer_ms=sum(link.transfer_ms for link in received) / steps,
        decode_ms=sum(link.decode_ms for link in received) / steps,
    )


def without_links(compute_ms: float, steps: int) -> Parts:
    """Where there are none, which is not the same as links that take no time."""
    return Parts(compute_ms=compute_ms / steps, encode_ms=None, wait_ms=None, transfer_ms=None, decode_ms=None)
