"""Adaptive bits on worker 0, whose links and clock are emulated: rates change, and the bits follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from thinpipe.pipeline.order import make_order
from thinpipe.train.engines.auto_bits import AutoBits
from thinpipe.train.engines.simulator import ActionCost, LinkCost, simulate
from thinpipe.train.shaping import Queue

CHUNKS, EVERY, VALUES = 4, 20, 100_000
LEVELS = (8, 4, 2)
BYTES = tuple(VALUES * level // 8 for level in LEVELS)
FORWARD_MS, BACKWARD_MS, DELAY_MS, CLOCKS_S = 5.0, 10.0, 20.0, 1234.5
HOPS = ((0, 1), (1, 0))


@dataclass
class Emulated:
    """Two workers with a stage each, and a link whose directions have rates."""

    rates: dict[tuple[int, int], float]  # Mbit/s
    levels: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    links: tuple[Any, ...] = ()
    order = "gpipe"
    chunks, stage_count = CHUNKS, 2
    world = SimpleNamespace(is_client=True)
    holdings = tuple(SimpleNamespace(stage=stage, worker=stage) for stage in range(2))

    def link_plans(self) -> list[Any]:
        facts = {"levels": LEVELS, "level_bytes": BYTES}
        return [SimpleNamespace(source=a, target=b, source_worker=a, target_worker=b, **facts) for a, b in HOPS]

    def set_levels(self, levels: dict[tuple[int, int], tuple[int, int]]) -> None:
        self.levels = levels

    def computed_ms(self) -> dict[int, tuple[float, float]]:
        return {}

    def step(self) -> tuple[list[float], float]:
        """Return the sums of what workers measure in a step, and its seconds."""
        sizes = {hop: BYTES[LEVELS.index(first)] for hop, (_, first) in self.levels.items()}
        times = [self._ms(hop, sizes[hop]) / 1e3 + (CLOCKS_S if hop == HOPS[0] else -CLOCKS_S) for hop in HOPS]
        costs = {(stage, kind): ActionCost(ms) for stage in range(2) for kind, ms in self._compute_ms().items()}
        links = {
            hop: LinkCost((Queue(str(hop), self.rates[hop]),), BYTES[LEVELS.index(self.levels[hop][0])], DELAY_MS)
            for hop in HOPS
        }
        seconds = simulate(make_order("gpipe", [0, 1], CHUNKS), costs, links).step_ms / 1e3  # type: ignore[arg-type]
        compute = [CHUNKS * FORWARD_MS, CHUNKS * BACKWARD_MS] * 2
        return [*times, *(float(sizes[hop]) for hop in HOPS), *compute], seconds

    def _ms(self, hop: tuple[int, int], size: int) -> float:
        return DELAY_MS + Queue("", self.rates[hop]).wire_ms(size)

    def _compute_ms(self) -> dict[str, float]:
        return {"F": FORWARD_MS, "B": BACKWARD_MS}


def run(auto: AutoBits, engine: Emulated, first: int, last: int) -> list[tuple[int, tuple[int, ...]]]:
    """Run steps; return the levels after each change."""
    changes = []
    for step in range(first, last + 1):
        auto.begin(step)
        sums, seconds = engine.step()
        own = auto.numbers()
        if auto.receive([*sums, *own[-len(HOPS) :]], seconds):
            changes.append((step, tuple(auto.levels)))
    return changes


@pytest.mark.parametrize("slow", [(10.0, 10.0), (1000.0, 10.0)])
def test_bits_follow_the_rates_of_both_directions_down_and_up_again(slow: tuple[float, float]) -> None:
    fast = dict.fromkeys(HOPS, 1000.0)
    engine = Emulated(rates=fast)
    auto = AutoBits(engine, EVERY)  # type: ignore[arg-type]
    assert run(auto, engine, 1, 50) == []
    assert auto.levels == [8, 8]
    engine.rates = dict(zip(HOPS, slow, strict=True))
    changes = run(auto, engine, 51, 110)
    assert changes[0][0] <= 54  # two slow steps are enough
    assert auto.levels == [2 if rate == 10.0 else 8 for rate in slow]
    assert changes[-1][0] <= 51 + 2 * EVERY
    engine.rates = fast
    changes = run(auto, engine, 111, 170)
    assert auto.levels == [8, 8]
    assert changes[-1][0] <= 111 + 2 * EVERY


def test_a_slow_link_is_found_in_the_first_interval() -> None:
    engine = Emulated(rates=dict.fromkeys(HOPS, 10.0))
    auto = AutoBits(engine, EVERY)  # type: ignore[arg-type]
    assert run(auto, engine, 1, EVERY) == [(EVERY, (2, 2))]
    assert run(auto, engine, EVERY + 1, 10 * EVERY) == []


def test_some_steps_send_the_first_chunk_with_other_bits() -> None:
    engine = Emulated(rates=dict.fromkeys(HOPS, 1000.0))
    found = {}
    for levels in ((8, 8), (4, 2)):
        auto, found[levels] = AutoBits(engine, EVERY, levels=levels), []  # type: ignore[arg-type]
        for step in range(1, EVERY + 1):
            auto.begin(step)
            found[levels].append([engine.levels[hop] for hop in HOPS])
    probes = [number for number, each in enumerate(found[8, 8], 1) if each != [(8, 8), (8, 8)]]
    assert probes == [5, 10, 15]
    assert found[8, 8][4] == [(8, 4), (8, 4)]
    assert found[4, 2][4] == [(4, 8), (2, 4)]


@dataclass
class Bursts(Emulated):
    """A link that forwards the first chunk of a step at once: it seems to be fast."""

    def _ms(self, hop: tuple[int, int], size: int) -> float:
        return DELAY_MS


def test_more_bits_that_make_steps_longer_are_taken_back_and_tried_ever_later() -> None:
    engine = Bursts(rates=dict.fromkeys(HOPS, 10.0))
    auto = AutoBits(engine, EVERY, levels=(2, 2))  # type: ignore[arg-type]
    changes = run(auto, engine, 1, 20 * EVERY)
    tried = [step for step, levels in changes if levels != (2, 2)]
    assert tried == [EVERY * number for number in (1, 3, 6, 11, 20)]  # after 1, 2, 4 and 8 intervals
    assert [step - last for (last, _), (step, _) in zip(changes[::2], changes[1::2], strict=False)] == [3] * 4
    assert auto.levels == [8, 8]  # tried in the last step
    engine.rates = dict.fromkeys(HOPS, 1000.0)
    assert run(auto, engine, 20 * EVERY + 1, 22 * EVERY) == []


def test_saved_levels_of_other_cuts_are_not_used() -> None:
    engine = Emulated(rates=dict.fromkeys(HOPS, 10.0))
    assert AutoBits(engine, EVERY, levels=(2, 4)).levels == [2, 4]  # type: ignore[arg-type]
    assert AutoBits(engine, EVERY, levels=(2, 4, 4)).levels == [8, 8]  # type: ignore[arg-type]
