"""Frames: the format of what the two ends of a pair send to each other, and its parser.

    kind  flags  0  size | stream | tag | sequence | acknowledged | credit | offset | total | payload of ``size`` bytes
     u8    u8   u16  u32 |  u64   | i64 |    u64   |     u64      |  u64   |  u64   |  u64  |

    kind          number  content
    HELLO                 payload: JSON of session.py; the first frame of each end on a connection
    ACK                   nothing but the fields that all frames have
    PING, PONG            offset: a number that PONG returns
    DATA          yes     a part of message (stream, tag): ``size`` of ``total`` bytes, from ``offset`` on
    WANT          yes     offset: which of the messages (stream, tag) to send next, counted from 0
    CONTROL       yes     payload: bytes of the control channel
    BYE           yes     the sender has ended its part; no frame with a number follows
    FAIL                  payload: JSON with the error that ended the sender's end of the pair

``sequence`` counts the frames with a number, from 1 on; it is 0 in the others. ``acknowledged`` is the last number
received, ``credit`` the limit of charged bytes, see session.py. Nothing is unpickled, and a frame that announces more
than arrives costs its receiver one payload at most.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

HELLO, ACK, PING, PONG, DATA, WANT, CONTROL, BYE, FAIL = range(1, 10)
NUMBERED = frozenset({DATA, WANT, CONTROL, BYE})
CHARGED = 1  # a flag of DATA: the bytes count against the credit

_HEADER = struct.Struct("<BBHIQqQQQQQ")
HEADER_BYTES = _HEADER.size
FRAME_BYTES = 256 << 10  # of the longest frame: sixteen records of TLS, and few enough to stay in a core's cache
PAYLOAD_BYTES = FRAME_BYTES - HEADER_BYTES
_PAYLOADS = {
    HELLO: 1 << 10,
    DATA: PAYLOAD_BYTES,
    CONTROL: 1 << 14,
    FAIL: 1 << 12,
}  # the longest; of other kinds nothing
_LARGEST = 1 << 62  # no honest number comes near it
_SEQUENCE = struct.Struct("<Q"), 24
_STATE = struct.Struct("<QQ"), 32  # acknowledged and credit

_SCRATCH_BYTES = 1 << 15
_RECORD_BYTES = 1 << 14
_DIRECT_BYTES = 1 << 12  # a payload of which more is missing is received in place


class FrameError(Exception):
    """The peer sent what the protocol does not allow."""


class Frame(NamedTuple):
    """The header of a frame."""

    kind: int
    flags: int
    zero: int
    size: int
    stream: int
    tag: int
    sequence: int
    acknowledged: int
    credit: int
    offset: int
    total: int


def new_frame(
    kind: int, size: int = 0, *, stream: int = 0, tag: int = 0, flags: int = 0, offset: int = 0, total: int = 0
) -> memoryview:
    """Return the memory of a frame; its numbers and its payload are filled in later."""
    frame = memoryview(bytearray(HEADER_BYTES + size))
    describe_frame(frame, kind, stream=stream, tag=tag, flags=flags, offset=offset, total=total)
    return frame


def describe_frame(
    frame: memoryview, kind: int, *, stream: int = 0, tag: int = 0, flags: int = 0, offset: int = 0, total: int = 0
) -> None:
    """Write the header of a frame whose memory is used again."""
    size = len(frame) - HEADER_BYTES
    _HEADER.pack_into(frame, 0, kind, flags, 0, size, stream, tag, 0, 0, 0, offset, total)


def json_frame(kind: int, content: dict[str, Any]) -> memoryview:
    data = json.dumps(content).encode()
    frame = new_frame(kind, len(data))
    frame[HEADER_BYTES:] = data
    return frame


def number_frame(frame: memoryview, sequence: int) -> None:
    _SEQUENCE[0].pack_into(frame, _SEQUENCE[1], sequence)


def stamp_frame(frame: memoryview, acknowledged: int, credit: int) -> None:
    """Write the state of the sender into a frame, right before it is sent."""
    _STATE[0].pack_into(frame, _STATE[1], acknowledged, credit)


def join_small(found: list[memoryview]) -> list[memoryview]:
    """Join small frames up to one record of TLS each, which becomes one packet."""
    groups: list[list[memoryview]] = []
    size = _RECORD_BYTES
    for frame in found:
        if size + len(frame) > _RECORD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(frame)
        size += len(frame)
    return [group[0] if len(group) == 1 else memoryview(b"".join(group)) for group in groups]


def parse_header(data: memoryview) -> Frame:
    """Return the header at the start of ``data``; raise FrameError if no end could have sent it."""
    frame = Frame._make(_HEADER.unpack_from(data))
    if not HELLO <= frame.kind <= FAIL:
        raise FrameError(f"kind {frame.kind} of a frame is unknown")
    if frame.zero or frame.flags & ~(CHARGED if frame.kind == DATA else 0):
        raise FrameError(f"flags {frame.flags} and {frame.zero} of a frame of kind {frame.kind} are unknown")
    if frame.size > _PAYLOADS.get(frame.kind, 0):
        raise FrameError(f"a frame of kind {frame.kind} has {frame.size} bytes, more than it may")
    if (frame.sequence > 0) != (frame.kind in NUMBERED) or max(frame[6:]) > _LARGEST:
        raise FrameError(f"a frame of kind {frame.kind} has invalid numbers {frame[6:]}")
    if frame.kind == DATA and (frame.offset + frame.size > frame.total or (frame.size == 0) != (frame.total == 0)):
        raise FrameError(f"a frame has bytes {frame.offset} to {frame.offset + frame.size} of {frame.total}")
    return frame


def parse_json(payload: memoryview) -> dict[str, Any]:
    """Return the JSON object in a payload."""
    try:
        content = json.loads(bytes(payload))
    except (ValueError, RecursionError):
        raise FrameError("a frame has no valid JSON") from None
    if not isinstance(content, dict):
        raise FrameError("a frame has JSON that is not an object")
    return content


class Parser:
    """Splits a stream of bytes into frames. Sans-I/O: read into ``buffer()``, then iterate over ``received(count)``.

    ``destination`` is called with every header, and returns memory for the payload; a frame is yielded once that is
    filled. The next header is parsed only after the loop over ``received`` has handled the frame.
    """

    def __init__(self, destination: Callable[[Frame], memoryview]) -> None:
        self._destination = destination
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._filled = 0
        self._frame: Frame | None = None
        self._payload = self._scratch[:0]
        self._at = 0
        self._direct = False

    def buffer(self) -> memoryview:
        """Return the memory to read into next; never empty."""
        self._direct = len(self._payload) - self._at >= _DIRECT_BYTES
        return self._payload[self._at :] if self._direct else self._scratch[self._filled :]

    def received(self, count: int) -> Iterator[tuple[Frame, memoryview]]:
        """Take ``count`` bytes that were read into ``buffer()``; yield the frames that they complete."""
        if self._direct:
            self._at += count
            if self._at == len(self._payload) and self._frame is not None:
                yield self._complete(self._frame)
            return
        start, end = 0, self._filled + count
        while True:
            if self._frame is None:
                if end - start < HEADER_BYTES:
                    break
                frame = parse_header(self._scratch[start:end])
                self._payload, self._at = self._destination(frame), 0
                assert len(self._payload) == frame.size
                self._frame, start = frame, start + HEADER_BYTES
            size = min(len(self._payload) - self._at, end - start)
            self._payload[self._at : self._at + size] = self._scratch[start : start + size]
            self._at, start = self._at + size, start + size
            if self._at < len(self._payload):
                break
            yield self._complete(self._frame)
        self._filled = end - start
        self._scratch[: self._filled] = bytes(self._scratch[start:end])

    def _complete(self, frame: Frame) -> tuple[Frame, memoryview]:
        payload, self._frame = self._payload, None
        self._payload, self._at = self._scratch[:0], 0
        return frame, payload
