"""The choice of levels: pure functions of bytes and times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from thinpipe.train.engines.level_choice import Transfer, choose_levels, fit_transfer, follow_transfer

LEVELS = (8, 4, 2)


def test_two_sizes_give_the_rate_and_the_offset_whatever_the_clocks() -> None:
    samples = [(size, 5000.0 + 1e-6 * size + late) for size in (1000, 2000) for late in (0.003, 0.0, 0.001)]
    found = fit_transfer(samples)
    assert found is not None
    assert found == pytest.approx((5000.0, 1e-6))


@pytest.mark.parametrize(
    "samples",
    [[], [(1000, 1.0)] * 5, [(1000, 1.0), (2000, 2.0), (2000, 2.0)], [(1000, 1.0), (1000, 1.0), (1100, 2.0)] * 2],
)
def test_one_size_gives_no_rate(samples: list[tuple[int, float]]) -> None:
    assert fit_transfer(samples) is None


def test_a_larger_message_that_takes_no_longer_has_no_limit() -> None:
    assert fit_transfer([(1000, 0.5), (1000, 0.5), (2000, 0.4), (2000, 0.4)]) == Transfer(0.5, 0.0)


def test_with_a_known_offset_one_size_gives_the_rate() -> None:
    assert follow_transfer(Transfer(3.0, 1e-6), [(1000, 3.01), (1000, 3.02)]) == pytest.approx((3.0, 1e-5))
    assert follow_transfer(Transfer(3.0, 1e-6), []) == Transfer(3.0, 1e-6)
    assert follow_transfer(None, [(1000, 3.01)]) is None


def test_small_messages_that_were_all_delayed_do_not_make_a_link_fast() -> None:
    samples = [(size, seconds) for size, seconds in ((1000, 0.019), (2000, 0.020)) for _ in range(2)]
    assert follow_transfer(None, samples) == pytest.approx((0.018, 1e-6))
    assert follow_transfer(None, samples, 0.0) == pytest.approx((0.0, 1e-5))  # a message took no time before


def step_ms(links: Sequence[float]) -> object:
    """Return a model of steps in which links hide behind 100 ms of computing; ``links``: ms at 1 bit per value."""

    def duration(chosen: Sequence[int]) -> float:
        return max(100.0, *(ms * LEVELS[level] for ms, level in zip(links, chosen, strict=True)))

    return duration


@pytest.mark.parametrize(
    ("links", "current", "expected"),
    [
        ((1.0, 1.0), (8, 8), (8, 8)),  # all is hidden
        ((1.0, 1.0), (2, 2), (8, 8)),
        ((20.0, 20.0), (8, 8), (4, 4)),  # 160 ms at 8 bits, 80 at 4
        ((100.0, 100.0), (8, 8), (2, 2)),  # never hidden
        ((5.0, 100.0), (8, 8), (8, 2)),  # one direction is slow; the other has 200 ms to hide behind
        ((13.0, 1.0), (4, 8), (4, 8)),  # 104 ms at 8 bits: not worth a change
        ((13.0, 1.0), (8, 8), (8, 8)),  # nor is it from 8
        ((13.3, 1.0), (8, 8), (4, 8)),
    ],
)
def test_choice(links: tuple[float, float], current: tuple[int, int], expected: tuple[int, int]) -> None:
    indices = [LEVELS.index(level) for level in current]
    chosen = choose_levels(step_ms(links), indices, [len(LEVELS)] * 2)  # type: ignore[arg-type]
    assert tuple(LEVELS[index] for index in chosen) == expected
