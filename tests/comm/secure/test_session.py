"""Sessions: whatever is lost, every message arrives once and in order; whatever a peer sends, memory is bounded."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.secure.pairs import Pair, Program
from tests.comm.secure.test_frames import CASES, frame_of, mutated_stream
from thinpipe.comm.secure import frames, inbox, outbox
from thinpipe.comm.secure.frames import HEADER_BYTES, FrameError
from thinpipe.comm.secure.session import Session

COST = 256


@pytest.fixture(autouse=True)
def short_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a few hundred bytes take several frames, whose memory is used again."""
    monkeypatch.setattr(outbox, "PAYLOAD_BYTES", 96)
    monkeypatch.setattr(frames, "FRAME_BYTES", HEADER_BYTES + 96)
    for module in (inbox, outbox):
        monkeypatch.setattr(module, "FRAME_COST", COST)


def run_with_cut(at: int) -> int:
    """Run a fixed program, lose the connection after byte ``at``; return how many bytes were delivered."""
    pair = Pair(window=1500, buffer_bytes=700)
    program = Program(random.Random(1), pair, messages=6, longest=150)

    def move(end: int) -> int:
        count = pair.move(end, at - pair.moved if pair.moved < at else 1 << 30)
        if count and pair.moved == at:
            pair.cut()
        return count

    for turn in range(60):
        (program.send, program.receive)[turn // 2 % 2](turn % 2)
        if turn % 3:
            move(turn % 2)
    moved = True
    while moved:
        for each in pair.ends:
            each.acknowledge()
        moved = move(0) + move(1) > 0
    program.check()
    return pair.moved


def test_a_cut_after_every_byte() -> None:
    total = run_with_cut(0)
    assert total > 1000
    for at in range(1, total + 1):
        assert run_with_cut(at) > 1000


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 1 << 32), st.floats(0, 0.3), st.sampled_from([1500, 3000, 1 << 20]))
def test_any_order_of_events(seed: int, cut_rate: float, window: int) -> None:
    rng = random.Random(seed)
    pair = Pair(window=window, buffer_bytes=rng.choice((700, 1 << 20)))
    program = Program(rng, pair, messages=20, longest=400)
    while any(program.left) or any(program.open):
        end = rng.randrange(2)
        rng.choice((program.send, program.receive))(end)
        pair.move(end, rng.choice((0, 1, 70, 1000, 10_000)))
        if rng.random() < cut_rate:
            pair.cut()
        if rng.random() < 0.2:
            pair.ends[end].acknowledge()
        for each in pair.ends:
            assert each._inbox._held <= window
    pair.settle()
    program.check()
    for each in pair.ends:
        each.leave()
    pair.settle()
    assert all(each.finished for each in pair.ends)
    assert pair.ends[0]._outbox._buffered == pair.ends[1]._outbox._buffered == 0


@pytest.mark.parametrize("window", [1500, 3000])
def test_receives_against_the_order_of_sends(window: int) -> None:
    """The window holds one or two of twenty messages; each receive is posted when the one before is complete."""
    pair = Pair(window=window, buffer_bytes=500)
    for tag in range(20):
        for end in (0, 1):
            pair.ends[end].send(0, tag, memoryview(bytes([tag]) * 300))
    pair.settle()
    for tag in reversed(range(20)):
        for end in (0, 1):
            memory = bytearray(300)
            operation = pair.ends[end].receive(0, tag, memoryview(memory))
            pair.settle()
            assert operation.done
            assert memory == bytes([tag]) * 300


def test_receives_posted_before_the_window_fills() -> None:
    pair = Pair(window=2000)
    memory = bytearray(300)
    expected = pair.ends[1].receive(0, 50, memoryview(memory))
    sends = [pair.ends[0].send(0, tag, memoryview(bytes(300))) for tag in range(20)]
    pair.settle()
    assert not sends[-1].done  # back-pressure
    last = pair.ends[0].send(0, 50, memoryview(b"a" * 300))
    pair.settle()
    assert expected.done
    assert last.done
    assert memory == b"a" * 300


def test_a_send_is_complete_before_it_is_acknowledged() -> None:
    pair = Pair()
    assert not pair.ends[0].send(0, 0, memoryview(b"a")).done  # the credit is not known yet
    pair.settle()
    assert pair.ends[0].send(0, 0, memoryview(b"b")).done
    assert pair.ends[0].send(0, 1, memoryview(bytes(97))).done is False  # copied by the channel, frame by frame
    assert pair.ends[0].stage(9) == 2


def test_long_sends_wait_for_the_buffer() -> None:
    pair = Pair(buffer_bytes=1000)
    pair.settle()
    operation = pair.ends[0].send(0, 0, memoryview(bytes(5000)))
    assert pair.ends[0].stage(100) == 3  # 96 + 64 + 256 bytes each
    assert not operation.done
    pair.ends[1].receive(0, 0, memoryview(bytearray(5000)))
    pair.settle()
    assert operation.done


def test_the_end_of_a_peer() -> None:
    pair = Pair()
    pair.settle()
    waiting = pair.ends[0].receive(0, 0, memoryview(bytearray(1)))
    pair.ends[1].send(0, 1, memoryview(b"x"))
    pair.ends[1].leave()
    assert pair.ends[1].send(0, 0, memoryview(b"x")).error == "this worker has ended its part of the run"
    pair.settle()
    assert pair.ends[1].finished
    assert pair.ends[0].left
    assert waiting.error == "worker 1 has ended its part of the run"
    memory = bytearray(1)
    assert pair.ends[0].receive(0, 1, memoryview(memory)).error is None  # it had arrived
    assert memory == b"x"
    assert pair.ends[0].send(0, 0, memoryview(b"x")).error == "worker 1 has ended its part of the run"
    assert not pair.ends[0].finished
    pair.ends[0].leave()
    assert pair.ends[0].finished


def test_an_error_ends_both_ends() -> None:
    pair = Pair()
    pair.settle()
    waiting = pair.ends[0].receive(0, 0, memoryview(bytearray(1)))
    pair.ends[1].fail("worker 0 sends nonsense" + "\x1b" * 10_000, report=True)
    pair.settle()
    assert waiting.error is not None
    assert waiting.error.startswith("worker 1 has ended the connection: worker 0 sends nonsense")
    assert len(waiting.error) < 3000
    assert waiting.error.isprintable()


def test_control_bytes_and_pings_overtake_messages() -> None:
    pair = Pair()
    pair.settle()
    pair.ends[0].send(0, 0, memoryview(bytes(4000)))
    pair.ends[0].send_control(b'{"step": 1}\n')
    pair.ends[0].ping(17)
    pair.move(0, 3 * HEADER_BYTES)
    assert pair.ends[1].control == b'{"step": 1}\n'
    pair.settle()
    assert pair.ends[0].echo == 17


def test_a_peer_that_was_started_again() -> None:
    pair = Pair()
    pair.settle()
    for again in (0, 1):
        other = Pair()
        other.ends[again] = pair.ends[again]
        with pytest.raises(FrameError, match="was started again meanwhile"):
            other.cut() or other.settle()


def hello(**changes: object) -> bytes:
    content = {"protocol": 1, "session": "0" * 32, "peer": "", **changes}
    return frame_of(frames.HELLO, json.dumps(content).encode())


def data(payload: bytes, sequence: int, **fields: int) -> bytes:
    fields = {"total": len(payload), "flags": frames.CHARGED, **fields}
    return frame_of(frames.DATA, payload, sequence, **fields)


def feed(session: Session, *sent: bytes, acknowledged: int = 0) -> None:
    for frame in sent:
        changed = bytearray(frame)
        changed[32:40] = acknowledged.to_bytes(8, "little")
        rest = memoryview(changed)
        while rest:
            buffer = session.buffer()
            count = min(len(buffer), len(rest))
            buffer[:count], rest = rest[:count], rest[count:]
            session.received(count)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ([frame_of(frames.ACK)], "begins with one HELLO"),
        ([hello(), hello()], "begins with one HELLO"),
        ([hello(protocol=2)], "it has version 2 of the protocol, this worker 1"),
        ([hello(session=5)], "it sends no id"),
        ([hello(peer="1" * 32)], "was started again"),
        ([hello(), data(b"a", 2)], "frame 2 follows after 0"),
        ([hello(), frame_of(frames.BYE, sequence=1), data(b"a", 2)], "frame 2 follows after 1 and BYE"),
        ([hello(), data(b"ab", 1, total=4), data(b"b", 2, total=4, offset=1)], "bytes from 1 of 4 arrive where 2 of 4"),
        ([hello(), data(b"ab", 1, total=4), data(b"b", 2, total=4, offset=3)], "bytes from 3 of 4 arrive where 2 of 4"),
        ([hello(), data(b"ab", 1, total=4), data(b"b", 2, total=5, offset=2)], "bytes from 2 of 5 arrive where 2 of 4"),
        ([hello(), data(b"b", 1, total=5, offset=2)], "bytes from 2 of 5 arrive where 0 of 5"),
        ([hello(), data(b"a" * 745, 1)], "more than 1000 bytes arrive for receives that are not posted"),
        ([hello(), data(b"a" * 400, 1), data(b"b" * 89, 2)], "more than 1000 bytes"),
        ([hello(), *(data(b"", each, tag=each) for each in range(1, 5))], "more than 1000 bytes"),
        ([hello(), data(b"a", 1, flags=0)], "uncharged that was not asked for"),
        ([hello(), data(b"a", 1, flags=0, tag=7)], "uncharged that was not asked for"),
        ([hello(), data(b"a" * 11, 1, tag=7)], "a message of 11 bytes arrives for a receive of 10"),
        ([hello(), data(b"a", 1, tag=7, total=11)], "a message of 11 bytes arrives for a receive of 10"),
    ],
)
def test_violations(sent: list[bytes], problem: str) -> None:
    session = Session("worker 1", window=1000)
    session.connect()
    session.receive(0, 7, memoryview(bytearray(10)))
    session.output()
    with pytest.raises(FrameError, match=problem):
        feed(session, *sent)


def test_a_message_longer_than_a_later_receive() -> None:
    session = Session("worker 1")
    session.connect()
    feed(session, hello(), data(b"abc", 1))
    with pytest.raises(FrameError, match="a message of 3 bytes arrives for a receive of 2"):
        session.receive(0, 0, memoryview(bytearray(2)))


def test_an_acknowledgement_of_what_was_not_sent() -> None:
    session = Session("worker 1")
    session.connect()
    feed(session, hello())
    buffer, frame = session.buffer(), frame_of(frames.ACK)  # of frame 3
    buffer[: len(frame)] = frame
    with pytest.raises(FrameError, match="frame 3 is acknowledged, the last one sent is 0"):
        session.received(len(frame))


def test_wants_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_MOST_WANTS", 10)
    session = Session("worker 1")
    session.connect()
    wants = [frame_of(frames.WANT, b"", each, tag=each) for each in range(1, 12)]
    feed(session, hello(), *wants[:10])
    with pytest.raises(FrameError, match="more than 10 messages are asked for that were not sent"):
        feed(session, wants[10])


def test_duplicates_are_dropped() -> None:
    session = Session("worker 1")
    session.connect()
    memory = bytearray(3)
    operation = session.receive(0, 0, memoryview(memory))
    feed(session, hello(), data(b"abc", 1), data(b"xyz", 1), data(b"def", 1))
    assert operation.done
    assert memory == b"abc"
    assert session._inbox._held == 0


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 1 << 32))
def test_valid_frames_in_any_order(seed: int) -> None:
    """Messages of a hostile peer raise an error, or take no more memory than the window."""
    rng = random.Random(seed)
    session = Session("worker 1", window=5000)
    session.connect()
    sequence = 0
    try:
        feed(session, hello())
        for _ in range(100):
            sequence += rng.random() < 0.98
            size = rng.choice((0, 0, 1, 96, 1000))
            total = rng.choice((size, size, 2 * size))
            frame = data(
                bytes(size),
                sequence,
                tag=rng.randrange(3),
                total=total,
                offset=rng.choice((0, 0, total - size)),
                flags=rng.random() < 0.9,
            )
            other = frame_of(rng.choice((frames.WANT, frames.BYE, frames.CONTROL)), b"", sequence, tag=rng.randrange(3))
            feed(session, other if rng.random() < 0.05 else frame)
            if rng.random() < 0.4:
                session.receive(0, rng.randrange(3), memoryview(bytearray(rng.choice((1, 96, 1000, 2000)))))
            if rng.random() < 0.4:
                session.send(0, rng.randrange(3), memoryview(bytes(50)))
            session.output()
            assert session._inbox._held <= 5000
            held = [chunk for queue in session._inbox._unexpected.values() for each in queue for chunk in each.chunks]
            assert sum(len(chunk) + COST for chunk in held) <= 5000
    except FrameError:
        pass


def fuzz(cases: int, seed: int) -> int:
    """Feed mutated streams to sessions; return how many were rejected. Any error but FrameError propagates."""
    rng, rejected = random.Random(seed), 0
    for _ in range(cases):
        session = Session("worker 1", window=5000)
        session.connect()
        session.receive(0, 3, memoryview(bytearray(100)))
        session.output()
        try:
            feed(session, hello())
            for tag in range(3):
                session.send(0, tag, memoryview(bytes(50)))
            session.output()  # three frames, that the stream acknowledges
            feed(session, mutated_stream(rng), acknowledged=3)
            session.output()
        except FrameError:
            rejected += 1
        assert session._inbox._held <= 5000
    return rejected


def test_fuzz() -> None:
    """THINPIPE_FUZZ_CASES sets the number of streams."""
    assert CASES // 4 * 0.2 < fuzz(CASES // 4, seed=0) < CASES // 4
