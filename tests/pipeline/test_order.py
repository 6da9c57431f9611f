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


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 8, 16, 33])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_action_runs_once_and_nothing_deadlocks(name: str, order: Order, chunks: int) -> None:
    placement = PLACEMENTS[name]
    orders = make_order(order, placement, chunks)
    done = run(orders, len(placement))
    assert len(done) == sum(map(len, orders.values())) == 2 * len(placement) * chunks
    for worker, actions in orders.items():
        assert all(placement[action.stage] == worker for action in actions)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_1f1b_holds_at_most_the_stages_that_follow(name: str) -> None:
    placement, chunks = PLACEMENTS[name], 16
    for actions in make_order("1f1b", placement, chunks).values():
        held = dict.fromkeys(range(len(placement)), 0)
        for action in actions:
            held[action.stage] += 1 if action.kind == "F" else -1
            assert held[action.stage] <= len(placement) - action.stage


def test_refuses_what_makes_no_order() -> None:
    with pytest.raises(ValueError, match="'gpipe' or '1f1b', got 'zero'"):
        make_order("zero", [0, 1], 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 chunk or more, got 0"):
        make_order("gpipe", [0, 1], 0)
