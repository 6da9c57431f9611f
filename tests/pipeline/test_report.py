"""Reports and pictures: both ends of every link put together, waits separated from transfers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.models import batch, seeded
from tests.pipeline.pipelines import make, run_step
from tests.pool import Pool
from thinpipe.links.counters import Counters, LinkEnd, Stamp
from thinpipe.pipeline.report import LinkReport, _merge, report, reset_counters
from thinpipe.pipeline.trace import Bar, draw, gather_step, write_chrome_trace

CHUNKS, WIDTH, STEPS = 4, 256, 2
LATE_S = 0.2


def pipeline(group: Any) -> tuple[Any, Any]:
    options = {"forward": "uniform:8", "backward": "uniform:8"}
    return make(group, "client-server", "gpipe", CHUNKS, seeded(3, WIDTH), **options)


def reported(group: Any) -> tuple[list[LinkReport], int]:
    stages, schedule = pipeline(group)
    for _ in range(STEPS):
        run_step(stages, schedule, *batch(width=WIDTH))
    links = report(stages)
    reset_counters(stages)
    return links, sum(link.messages for link in report(stages))


def test_every_worker_sees_both_ends_of_every_link(pool: Pool) -> None:
    results = pool.run(reported, 2)
    assert results[0] == results[1]
    links, after_reset = results[0]
    assert after_reset == 0
    where = [(link.source, link.target, link.source_worker, link.target_worker, link.direction) for link in links]
    assert where == [
        (0, 1, 0, 1, "forward"),
        (1, 2, 1, 0, "forward"),
        (1, 0, 1, 0, "backward"),
        (2, 1, 0, 1, "backward"),
    ]
    for link in links:
        assert link.messages == CHUNKS * STEPS
        assert link.tensor_bytes == STEPS * 32 * WIDTH * 4
        assert link.tensor_bytes // 4 <= link.wire_bytes < link.tensor_bytes // 3
        assert link.encode_ms > 0
        assert link.decode_ms > 0
        assert link.wait_ms + link.transfer_ms == pytest.approx(link.blocked_ms, rel=1e-6, abs=1e-3)


def late_sender(group: Any) -> list[LinkReport]:
    """Worker 1 computes for a long while before it sends: the client waits for a sender, not for the network."""
    stages, schedule = pipeline(group)
    run_step(stages, schedule, *batch(width=WIDTH))
    reset_counters(stages)
    if group.rank() == 1:
        stages[0].submod.register_forward_pre_hook(lambda *_: time.sleep(LATE_S))
    run_step(stages, schedule, *batch(width=WIDTH))
    return report(stages)


def test_a_late_sender_is_not_a_slow_link(pool: Pool) -> None:
    links = pool.run(late_sender, 2)[0]
    back = next(link for link in links if (link.source, link.target) == (1, 2))
    assert back.wait_ms > LATE_S * 1e3  # at least a chunk's delay, whatever else the machine does
    assert back.transfer_ms < back.wait_ms
    assert back.link_mb_per_s is not None
    assert back.link_mb_per_s > back.blocked_mb_per_s


def test_split_of_blocked_time() -> None:
    """Three messages: sent before they were needed, sent after, arrived before they were needed but traced."""

    def end(sends: bool, rows: list[dict[str, Any]]) -> LinkEnd:
        stamps = tuple(Stamp(**{"step": 1, "slot": 0, "wire_bytes": 1_000_000, **row}) for row in rows)
        return LinkEnd(sends, 0, 1, Counters(), stamps, worker=0)

    send = end(True, [{"chunk": c, "start": t, "end": t} for c, t in enumerate((0.0, 2.0, 4.0))])
    receive = end(
        False,
        [
            {"chunk": 0, "start": 0.5, "end": 0.75},  # half of the transfer was hidden
            {"chunk": 1, "start": 1.0, "end": 2.5},  # 1 s late, 0.5 s on its way
            {"chunk": 2, "start": 9.0, "end": 9.0, "arrived": 4.5},  # hidden
        ],
    )
    link = _merge(send, receive)
    assert (link.wait_ms, link.transfer_ms) == (1000, 750)
    assert link.link_mb_per_s == pytest.approx(2 / 1.0)  # the second and the third: 2 MB in 0.5 + 0.5 s


def traced(group: Any, folder: str) -> list[Bar]:
    stages, schedule = pipeline(group)
    run_step(stages, schedule, *batch(width=WIDTH))
    for stage in stages:
        stage.trace()
    run_step(stages, schedule, *batch(width=WIDTH))
    bars = gather_step(stages)
    if group.rank() == 0:
        draw(bars, Path(folder) / "step.png")
        write_chrome_trace(bars, Path(folder) / "step.json")
    return bars


def test_picture_and_chrome_trace_of_a_step(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(traced, 2, str(tmp_path))
    assert first == second
    kinds = [bar.kind for bar in first]
    assert kinds.count("forward") == kinds.count("backward") == 3 * CHUNKS
    for kind in ("forward transfer", "backward transfer"):
        assert kinds.count(kind) == 2 * CHUNKS
    assert kinds.count("encode") == kinds.count("decode") == kinds.count("wait") == 4 * CHUNKS
    assert all(bar.end_ms >= bar.start_ms >= 0 for bar in first)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((tmp_path / "step.json").read_text())
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(first)
    assert all({"name", "pid", "tid", "ts", "dur"} <= event.keys() for event in complete)
