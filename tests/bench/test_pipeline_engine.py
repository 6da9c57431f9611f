"""The benchmark of the pipeline engine: what it promises is checked against its rows."""

from __future__ import annotations

from thinpipe.bench.pipeline_engine import check


def timed(link: str, of_torch: float, stage: str = "thinpipe none") -> dict[str, object]:
    return {"link": link, "schedule": "ScheduleGPipe", "stage": stage, "step_ms": 1.0, "of_torch": of_torch}


def weighed(gpipe: float | None, one_f_one_b: float | None) -> dict[str, object]:
    return {"layout": "linear", "worker": "0", "gpipe_mib": gpipe, "one_f_one_b_mib": one_f_one_b}


def test_the_worst_row_decides() -> None:
    rows = [
        timed("loopback", 1.2),
        timed("loopback", 0.9),
        timed("200 Mbit/s", 1.5),
        weighed(100, 50),
        weighed(100, 90),
    ]
    loopback, thin, memory = check(rows)
    assert (loopback.measured, loopback.passed) == (0.9, False)
    assert (thin.measured, thin.passed) == (1.5, True)
    assert (memory.measured, memory.passed) == (0.9, False)
    assert memory.detail == "linear, worker 0"


def test_compressed_stages_and_unknown_memory_are_not_judged() -> None:
    checks = check([timed("loopback", 1.0), timed("loopback", 0.5, "thinpipe sort:8"), weighed(None, None)])
    assert [one.measured for one in checks] == [1.0]
