"""The parser of frames: what was sent arrives in any pieces, and nothing else is an error of another kind."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.comm.secure import frames
from thinpipe.comm.secure.frames import HEADER_BYTES, PAYLOAD_BYTES, Frame, FrameError, Parser, new_frame

CASES = int(os.environ.get("THINPIPE_FUZZ_CASES", "20000"))


def frame_of(kind: int, payload: bytes = b"", sequence: int = 0, **fields: int) -> bytes:
    frame = new_frame(kind, len(payload), **fields)
    frame[HEADER_BYTES:] = payload
    frames.number_frame(frame, sequence)
    frames.stamp_frame(frame, 3, 1 << 20)
    return bytes(frame)


def parse(data: bytes, pieces: Iterator[int] | None = None, limit: int = PAYLOAD_BYTES) -> list[tuple[Frame, bytes]]:
    """Parse ``data`` in pieces of at most these sizes; fail if more memory is asked for than ``limit`` at a time."""

    def destination(frame: Frame) -> memoryview:
        assert 0 <= frame.size <= limit
        return memoryview(bytearray(frame.size))

    parser, found, view = Parser(destination), [], memoryview(data)
    while view:
        buffer = parser.buffer()
        assert buffer
        count = min(len(buffer), len(view), next(pieces, len(view)) if pieces else len(view))
        buffer[:count], view = view[:count], view[count:]
        found += [(frame, bytes(payload)) for frame, payload in parser.received(count)]
    return found


VALID = [
    frame_of(frames.HELLO, b'{"protocol": 1}'),
    frame_of(frames.ACK),
    frame_of(frames.PING, offset=7),
    frame_of(frames.DATA, b"abc", 1, stream=1 << 63, tag=-1, flags=frames.CHARGED, offset=4, total=9),
    frame_of(frames.DATA, b"", 2),
    frame_of(frames.DATA, bytes(range(256)) * 256, 3, total=1 << 40),
    frame_of(frames.WANT, b"", 4, stream=2, tag=3, offset=5),
    frame_of(frames.CONTROL, b"{}\n" * 2000, 5),
    frame_of(frames.DATA, bytes(5000), 6, total=5000),
    frame_of(frames.BYE, b"", 7),
    frame_of(frames.FAIL, b'{"error": "out of memory"}'),
]
SHORT = [each for each in VALID if len(each) < 200] + [
    frame_of(frames.DATA, b"abcdef"[start:stop], 1, tag=tag, flags=frames.CHARGED, offset=start, total=6)
    for tag in (3, 4)
    for start, stop in ((0, 6), (0, 3), (3, 6))
]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(VALID), max_size=8), st.lists(st.integers(1, 9000), max_size=200))
def test_frames_arrive_in_any_pieces(sent: list[bytes], pieces: list[int]) -> None:
    found = parse(b"".join(sent), iter(pieces))
    assert [bytes(each) for each in sent] == [_bytes_of(*each) for each in found]


def _bytes_of(frame: Frame, payload: bytes) -> bytes:
    return frame_of(
        frame.kind,
        payload,
        frame.sequence,
        stream=frame.stream,
        tag=frame.tag,
        flags=frame.flags,
        offset=frame.offset,
        total=frame.total,
    )


def test_every_byte_alone() -> None:
    data = b"".join(VALID[:5])
    assert parse(data, iter([1] * len(data))) == parse(data)


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (frame_of(0), "kind 0 of a frame is unknown"),
        (frame_of(10), "kind 10 of a frame is unknown"),
        (frame_of(frames.ACK, flags=1), "flags 1 and 0 of a frame of kind 2 are unknown"),
        (frame_of(frames.DATA, b"a", 1, flags=2, total=1), "flags 2 and 0"),
        (frame_of(frames.ACK, b"a"), "kind 2 has 1 bytes, more than it may"),
        (frame_of(frames.HELLO, bytes(1025)), "kind 1 has 1025 bytes"),
        (frame_of(frames.CONTROL, bytes(16385), 1), "kind 7 has 16385 bytes"),
        (frame_of(frames.DATA, bytes(PAYLOAD_BYTES + 1), 1, total=PAYLOAD_BYTES + 1), "kind 5 has 262081 bytes"),
        (frame_of(frames.FAIL, bytes(4097)), "kind 9 has 4097 bytes"),
        (frame_of(frames.ACK, sequence=1), "kind 2 has invalid numbers"),
        (frame_of(frames.BYE), "kind 8 has invalid numbers"),
        (frame_of(frames.BYE, sequence=1 << 63), "kind 8 has invalid numbers"),
        (frame_of(frames.DATA, b"abc", 1, offset=1, total=3), "a frame has bytes 1 to 4 of 3"),
        (frame_of(frames.DATA, b"", 1, offset=3, total=3), "a frame has bytes 3 to 3 of 3"),
    ],
)
def test_invalid_frames(frame: bytes, problem: str) -> None:
    with pytest.raises(FrameError, match=problem):
        parse(frame)


def test_a_long_announcement_allocates_nothing() -> None:
    """The length is checked before ``destination`` is called."""
    header = bytearray(frame_of(frames.DATA, b"", 1, total=0)[:HEADER_BYTES])
    header[4:8] = b"\xff" * 4
    with pytest.raises(FrameError, match="has 4294967295 bytes"):
        parse(bytes(header), limit=0)


@pytest.mark.parametrize("text", ["", "[1]", '{"a"', "[" * 1000, "\xff", "1e999", '{"a": 1}x', "{1: 2}"])
def test_invalid_json(text: str) -> None:
    with pytest.raises(FrameError):
        frames.parse_json(memoryview(text.encode("latin-1")))


def mutated_stream(rng: random.Random) -> bytes:
    """Return frames with the right numbers, with bytes changed, removed and inserted."""
    data, number = bytearray(), 0
    for each in rng.choices(SHORT, k=rng.randint(1, 4)):
        frame = memoryview(bytearray(each))
        if any(frame[24:32]):
            number += 1
            frames.number_frame(frame, number)
        data += frame
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            case 1:
                del data[at : at + rng.randint(1, 80)]
                data = data or bytearray(1)
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 80))
            case 3:
                data[at : at + 8] = rng.choice(((1 << 64) - 1, 1 << 63, 1 << 32, rng.getrandbits(64))).to_bytes(8)
    return bytes(data)


def fuzz(cases: int, seed: int) -> int:
    """Parse mutated streams; return how many were rejected. Any error but FrameError propagates."""
    rng, rejected = random.Random(seed), 0
    for _ in range(cases):
        try:
            for frame, payload in parse(mutated_stream(rng), iter(rng.randint(1, 100) for _ in range(50))):
                assert len(payload) == frame.size
                if frame.kind in (frames.HELLO, frames.FAIL):
                    frames.parse_json(memoryview(payload))
        except FrameError:
            rejected += 1
    return rejected


def test_fuzz() -> None:
    """THINPIPE_FUZZ_CASES sets the number of streams."""
    assert CASES * 0.2 < fuzz(CASES, seed=0) < CASES
