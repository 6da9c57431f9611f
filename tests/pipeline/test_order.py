"""Orders: complete, possible to run without deadlock, and 1F1B holds few chunks."""

import pytest

from thinpipe.pipeline.order import Action, Order, make_order

PLACEMENTS = {
    **{f"linear-{workers}": list(range(workers)) for workers in range(1, 9)},
    **{f"client-server-{workers}": [stage % workers for stage in range(workers + 1)] for workers in range(2, 9)},
}


def run(orders: dict[int, list[Action]], stages: int) -> set[Action]:
    """Run every worker's list in order, each blocking until what it needs has been computed by someone."""
    todo = {worker: list(actions) for worker, actions in orders.items()}
    done: set[Action] = set()

    def possible(action: Action) -> bool:
        stage, kind, chunk = action
        if kind == "F":
            return stage == 0 or Action(stage - 1, "F", chunk) in done
        after = stage == stages - 1 or Action(stage + 1, "B", chunk) in done
        return after and Action(stage, "F", chunk) in done

    progress = True
    while progress:
        progress = False
        for actions in todo.values():
            while actions and possible(actions[0]):
                done.add(actions.pop(0))
                progress = True
    assert not any(todo.values()), f"deadlock: {todo}"
    return done


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "1f1b:1", "1f1b:7", "1f1b:99"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_action_runs_once_and_nothing_deadlocks(name: str, order: Order) -> None:
    placement = PLACEMENTS[name]
    for chunks in (1, 2, 3, 4, 5, 8, 16, 33):
        orders = make_order(order, placement, chunks)
        done = run(orders, len(placement))
        assert len(done) == sum(map(len, orders.values())) == 2 * len(placement) * chunks
        for worker, actions in orders.items():
            assert all(placement[action.stage] == worker for action in actions)


def most_held(orders: dict[int, list[Action]], stages: int) -> list[int]:
    """The most chunks of each stage whose forward is done and whose backward is not."""
    held, most = [0] * stages, [0] * stages
    for actions in orders.values():
        for stage, kind, _ in actions:
            held[stage] += 1 if kind == "F" else -1
            most[stage] = max(most[stage], held[stage])
    return most


@pytest.mark.parametrize("name", PLACEMENTS)
def test_1f1b_keeps_at_most_as_many_chunks_as_stages_follow(name: str) -> None:
    placement = PLACEMENTS[name]
    held = most_held(make_order("1f1b", placement, 16), len(placement))
    assert all(most <= len(placement) - stage for stage, most in enumerate(held))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_1f1b_has_as_many_chunks_in_flight_as_requested(name: str) -> None:
    placement = PLACEMENTS[name]
    if len(placement) > 1:
        held = most_held(make_order("1f1b:12", placement, 64), len(placement))
        assert held[0] == 12
        assert held[-1] == 1
        assert held == sorted(held, reverse=True)
    assert make_order(f"1f1b:{len(placement)}", placement, 16) == make_order("1f1b", placement, 16)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_gpipe_runs_backward_immediately_on_the_last_stage(name: str) -> None:
    """And forwards are in the order of stages, then chunks: what a worker draws at random depends on it."""
    placement, chunks = PLACEMENTS[name], 5
    last = len(placement) - 1
    orders = make_order("gpipe", placement, chunks)
    assert most_held(orders, len(placement)) == [chunks] * last + [1]
    for worker, actions in orders.items():
        here = [stage for stage in range(len(placement)) if placement[stage] == worker]
        forwards = [(stage, chunk) for stage, kind, chunk in actions if kind == "F"]
        backwards = [(stage, chunk) for stage, kind, chunk in actions if kind == "B"]
        assert forwards == [(stage, chunk) for stage in here for chunk in range(chunks)]
        assert backwards == [(stage, chunk) for stage in reversed(here) for chunk in range(chunks)]


def test_a_first_stage_does_not_wait_for_gradients_in_transit() -> None:
    """Links that take a chunk's time each way: four chunks under way keep both workers busy, two do not."""
    for order, first_backward in (("1f1b", 2), ("1f1b:4", 4), ("gpipe", 16)):
        actions = make_order(order, [0, 1], 16)[0]
        assert [action.kind for action in actions].index("B") == first_backward
    kinds = "".join(action.kind for action in make_order("1f1b:4", [0, 1], 16)[0])
    assert kinds == "FFFF" + "BF" * 12 + "BBBB"


def test_a_client_sends_gradients_between_activations() -> None:
    """So that a server has backwards to compute while activations are on their way."""
    client, server = (
        " ".join(f"{action.kind}{action.stage}" for action in actions)
        for actions in make_order("1f1b:5", [0, 1, 0], 16).values()
    )
    assert client == "F0 F0 F0 F2 B2 F0 F2 B2 " + "F0 F2 B2 B0 " * 12 + "F2 B2 B0 F2 B2 B0 B0 B0"
    assert server == "F1 F1 F1 " + "B1 F1 " * 13 + "B1 B1 B1"


@pytest.mark.parametrize("order", ["zero", "gpipe:3", "1f1b:0", "1f1b:", "1f1b:-1", "1F1B"])
def test_invalid_orders_are_rejected(order: str) -> None:
    with pytest.raises(ValueError, match=f"gpipe, 1f1b, or 1f1b:N .*; got '{order}'"):
        make_order(order, [0, 1], 4)


def test_refuses_no_chunks() -> None:
    with pytest.raises(ValueError, match="1 chunk or more, got 0"):
        make_order("gpipe", [0, 1], 0)
