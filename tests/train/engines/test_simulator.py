"""The simulator against closed forms: bubbles of the schedules, links that bound a step, the end of a step."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.pipeline.order import make_order
from thinpipe.train.engines.simulator import ActionCost, LinkCost, StepEnd, simulate
from thinpipe.train.shaping import Queue

times = st.floats(0.01, 50)


def equal_stages(stages: int, forward: float, backward: float) -> dict[tuple[int, str], ActionCost]:
    return {(stage, kind): ActionCost(forward if kind == "F" else backward) for stage in range(stages) for kind in "FB"}


def chain(stages: int, wire_bytes: int, delay_ms: float, mbit: float | None = None) -> dict[tuple[int, int], LinkCost]:
    hops = [(stage, stage + step) for stage in range(stages) for step in (1, -1) if 0 <= stage + step < stages]
    return {hop: LinkCost((Queue(f"{hop}", mbit),), wire_bytes, delay_ms) for hop in hops}


def end_of(workers: int, delay_ms: float, update_ms: float) -> StepEnd:
    delays = delay_ms * (1 - np.eye(workers))
    return StepEnd(delay_ms=delays, before_ms=[0.0] * workers, update_ms=[update_ms] * workers)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 7), st.integers(1, 12), times)
def test_equal_stages_have_the_bubble_of_the_books(order: str, stages: int, chunks: int, forward: float) -> None:
    found = simulate(make_order(order, list(range(stages)), chunks), equal_stages(stages, forward, 2 * forward))
    assert found.step_ms == pytest.approx(3 * forward * (chunks + stages - 1))
    assert found.busy_ms == pytest.approx([3 * forward * chunks] * stages)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 8), times, times)
def test_delays_count_once_there_and_back_under_gpipe(stages: int, chunks: int, forward: float, delay: float) -> None:
    orders = make_order("gpipe", list(range(stages)), chunks)
    # The last stage is the bottleneck: forwards are free elsewhere, so all else is filling and draining.
    costs = equal_stages(stages, 0.0, 0.0) | {(stages - 1, kind): ActionCost(forward) for kind in "FB"}
    assert simulate(orders, costs, chain(stages, 0, delay)).step_ms == pytest.approx(
        2 * forward * chunks + 2 * delay * (stages - 1)
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.floats(0.1, 1000), st.integers(1, 10**6), times)
def test_a_slow_link_bounds_a_step(chunks: int, mbit: float, size: int, delay: float) -> None:
    """Two stages that take no time: the activations of all chunks, and the gradient of the last one after them."""
    wire = Queue("", mbit).wire_ms(size)
    found = simulate(make_order("gpipe", [0, 1], chunks), equal_stages(2, 0, 0), chain(2, size, delay, mbit))
    assert found.step_ms == pytest.approx((chunks + 1) * wire + 2 * delay)
    assert sorted(found.queue_ms.values()) == pytest.approx([chunks * wire] * 2)


def test_a_shared_queue_takes_messages_in_the_order_of_time() -> None:
    """Both directions through one queue: as much time as one direction with the bytes of both."""
    queue = Queue("one for all", 8)  # 1 ms for 1 kB
    links = {(0, 1): LinkCost((queue,), 1000, 0.0), (1, 0): LinkCost((queue,), 1000, 0.0)}
    found = simulate(make_order("gpipe", [0, 1], 4), equal_stages(2, 0.1, 0.1), links)
    assert found.queue_ms == {queue: pytest.approx(8)}
    assert found.step_ms == pytest.approx(8.2)  # from the end of the first forward to the begin of the last backward


def test_codecs_take_the_time_of_their_worker() -> None:
    costs = {(0, "F"): ActionCost(1, 0, 5), (1, "F"): ActionCost(1, 7), (1, "B"): ActionCost(1, 0, 5)}
    costs[0, "B"] = ActionCost(1, 7)
    assert simulate(make_order("gpipe", [0, 1], 1), costs).step_ms == pytest.approx(28)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), times, times)
def test_a_step_ends_when_all_statistics_have_arrived(workers: int, delay: float, update: float) -> None:
    orders, costs = make_order("gpipe", list(range(workers)), 2), equal_stages(workers, 1, 2)
    end = end_of(workers, delay, update)
    found = simulate(orders, costs, end=end, steps=3)
    bare = simulate(orders, costs).step_ms
    assert found.ends[0][-1] == pytest.approx(bare + (delay if workers > 1 else 0) + update)
    # Worker 0 is last in GPipe. It need not wait for the others, which begin the next step a delay later, but it
    # computes meanwhile: a step takes at most a delay longer.
    assert bare + update <= found.step_ms + 1e-9 <= bare + update + delay + 1e-6


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "1f1b:100"])
def test_many_workers_in_every_order(order: str) -> None:
    stages, chunks = 90, 40
    orders = make_order(order, list(range(stages)), chunks)
    found = simulate(orders, equal_stages(stages, 1, 2), chain(stages, 10, 1.0, 1000.0))
    assert sum(map(len, orders.values())) == 2 * stages * chunks
    assert found.busy_ms == [3.0 * chunks] * stages
    assert found.step_ms >= 3 * (chunks + stages - 1) + 2 * (stages - 1)


def test_workers_share_cores() -> None:
    stages, chunks = 3, 4
    pipeline = make_order("gpipe", list(range(stages)), chunks)
    ample, few = (
        simulate(pipeline, equal_stages(stages, 1, 2), slowdown=slowdown).step_ms
        for slowdown in ((), range(1, stages + 1))
    )
    assert simulate(pipeline, equal_stages(stages, 1, 2)).step_ms == ample
    assert few == pytest.approx(stages * chunks * 3)  # all work, one after another
    assert (
        ample
        < simulate(
            pipeline, equal_stages(stages, 1, 2), slowdown=[1, 1, *[each / 2 for each in range(3, stages + 1)]]
        ).step_ms
        < few
    )


def test_intervals_of_the_last_step() -> None:
    orders = make_order("1f1b", [0, 1, 0], 3)
    links = {hop: each for hop, each in chain(3, 100, 2.0, 10.0).items()}
    found = simulate(orders, equal_stages(3, 1, 2), links, end=end_of(2, 2.0, 1.0), steps=2, record=True)
    for worker, actions in orders.items():
        mine = [each for each in found.intervals if each.worker == worker]
        assert [each.action for each in mine] == actions
        assert all(one.ended <= other.began + 1e-9 for one, other in pairwise(mine))
    assert all(each.arrived is None or each.arrived <= each.began + 1e-9 for each in found.intervals)
    assert min(each.began for each in found.intervals) >= min(found.ends[0])
