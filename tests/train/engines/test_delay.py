"""The cost of network delay by a logical clock: messages are recorded when sent, expected and awaited."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist

from tests.pool import Pool
from tests.train.toy import ToyTask, run_toy
from thinpipe.train import loop
from thinpipe.train.batches import epoch_order
from thinpipe.train.engines.finite import NotFiniteError

# What happened on a worker, in its order: what, with whom, in which conversation, and which message of it.
Note = tuple[str, int, Hashable, int]


class Noted:
    """Work of torch's that is noted when somebody waits for it."""

    def __init__(self, work: Any, note: Note, notes: list[Note]) -> None:
        self.work, self.note, self.notes = work, note, notes

    def wait(self) -> None:
        self.work.wait()
        self.notes.append(self.note)


def train_noting(group: Any, given: dict[str, Any], nan_at: int | None = None) -> list[Note]:
    """Everything that this worker sent, expected and awaited in a run of two epochs of four steps."""
    notes: list[Note] = []
    serial: defaultdict[Hashable, itertools.count[int]] = defaultdict(itertools.count)
    send, recv, all_gather, step = dist.isend, dist.irecv, dist.all_gather, loop.train_step

    def noting_send(tensor: Any, *, group_dst: int, tag: int, **options: Any) -> Noted:
        number = next(serial["send", group_dst, tag])
        notes.append(("send", group_dst, tag, number))
        return Noted(send(tensor, group_dst=group_dst, tag=tag, **options), ("left", group_dst, tag, number), notes)

    def noting_recv(tensor: Any, *, group_src: int, tag: int, **options: Any) -> Noted:
        number = next(serial["recv", group_src, tag])
        notes.append(("expect", group_src, tag, number))
        return Noted(recv(tensor, group_src=group_src, tag=tag, **options), ("await", group_src, tag, number), notes)

    def noting_gather(*args: Any, **options: Any) -> None:
        others = [peer for peer in range(group.size()) if peer != group.rank()]
        for what in ("expect", "send", "await"):
            notes.extend((what, peer, "all", len(notes_of_all)) for peer in others)
        notes_of_all.append(None)
        all_gather(*args, **options)

    def noting_step(*args: Any, **options: Any) -> Any:
        done = step(*args, **options)
        notes.append(("step", -1, None, options["step"]))
        return done

    notes_of_all: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", noting_send)
        patch.setattr(dist, "irecv", noting_recv)
        patch.setattr(dist, "all_gather", noting_gather)
        patch.setattr(loop, "train_step", noting_step)
        with nullcontext() if nan_at is None else pytest.raises(NotFiniteError):
            run_toy(group, ToyTask(nan_at=nan_at), **given)
    return notes


def clocks(notes: list[list[Note]]) -> list[dict[int, int]]:
    """When each worker ended each step, in delays of a network on which all else takes no time.

    As gloo has it: a message leaves when word has come that it is expected, and arrives a delay later.
    """
    time, place = [0] * len(notes), [0] * len(notes)
    when: dict[tuple[str, int, Note | tuple[int, Hashable, int]], int] = {}
    ends: list[dict[int, int]] = [{} for _ in notes]

    def after(worker: int, what: str, peer: int, tag: Hashable, number: int) -> int | None:
        """The earliest that a worker can be over this note; None as long as another has not come to its part."""
        here, there = (peer, tag, number), (worker, tag, number)
        expected = when.get(("expect", *((worker, here) if what == "await" else (peer, there))))
        sent = when.get(("send", *((peer, there) if what == "await" else (worker, here))))
        if expected is None or sent is None:
            return None
        left = max(sent, expected + 1)
        return left + 1 if what == "await" else left

    while any(place[worker] < len(notes[worker]) for worker in range(len(notes))):
        before = list(place)
        for worker, todo in enumerate(notes):
            while place[worker] < len(todo):
                what, peer, tag, number = todo[place[worker]]
                if what == "step":
                    ends[worker][number] = time[worker]
                elif what in ("send", "expect"):
                    when[what, worker, (peer, tag, number)] = time[worker]
                else:
                    over = after(worker, what, peer, tag, number)
                    if over is None:
                        break
                    time[worker] = max(time[worker], over)
                place[worker] += 1
        assert place != before, "they would wait for each other for ever"
    return ends


@pytest.mark.parametrize(
    ("workers", "layout", "hops", "given"),
    [
        (2, "client-server", 4, {}),
        (2, "client-server", 4, {"compress_forward": "axes:2+now"}),
        (3, "client-server", 6, {"schedule": "1f1b:9"}),
        (3, "client-server", 6, {"clip_norm": 0.1}),
        (3, "linear", 4, {"clip_norm": 0.1}),
        (3, "linear", 4, {"schedule": "1f1b:9", "compress_forward": "axes:2+now"}),
    ],
)
def test_a_step_takes_one_delay_per_hop(
    pool: Pool, workers: int, layout: str, hops: int, given: dict[str, Any]
) -> None:
    """There and back for activations and for gradients, and nothing for statistics: not to clip, and not to go on."""
    for ends in clocks(pool.run(train_noting, workers, {"layout": layout, **given})):
        for step in (
            3,
            4,
            7,
            8,
        ):  # two after the start, or after an evaluation
            assert ends[step] - ends[step - 1] == hops


def test_no_step_has_a_collective_and_each_is_expected_before_it_begins(pool: Pool) -> None:
    """Unless an evaluation comes in between, which has the same tags."""
    for notes in pool.run(train_noting, 2, {}):
        ended = {number: place for place, (what, *_, number) in enumerate(notes) if what == "step"}
        for step in (2, 3, 4, 6, 7, 8):
            happened = notes[ended[step - 1] : ended[step]]
            assert "all" not in {tag for _, _, tag, _ in happened}
            expected, awaited = ([note[1:3] for note in happened if note[0] == what] for what in ("expect", "await"))
            assert len(awaited) > 1
            assert len(expected) == (1 if step in (4, 8) else len(awaited))  # one: the statistics of this step
            assert (step in (4, 8)) or sorted(expected) == sorted(awaited)


def test_a_run_that_stops_in_a_step_expects_nothing_any_more(pool: Pool) -> None:
    """Another run of the same workers would lose its first messages to what this one had expected."""
    broken = int(epoch_order(80, seed=0, epoch=0)[18 + 7])  # in the second of four steps
    for notes in pool.run(train_noting, 2, {}, broken):
        expected, awaited = ([note[1:] for note in notes if note[0] == what] for what in ("expect", "await"))
        assert set(expected) == set(awaited)
        assert [number for what, *_, number in notes if what == "step"] == [1]
