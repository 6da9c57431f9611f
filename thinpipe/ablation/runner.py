"""Carries out runs, several at a time, each a ``thinpipe train`` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from thinpipe.ablation.plan import Run
from thinpipe.ablation.store import Result
from thinpipe.ablation.verdict import figures_of, last_error
from thinpipe.workers.signals import end_with_parent

TRAIN = (sys.executable, "-m", "thinpipe", "train")  # not the console script: it may not be installed
_POLL_S = 0.05
_PATIENCE_S = 30  # for a training to end after Ctrl-C: it finishes its step and its workers leave


@dataclass(frozen=True)
class _Started:
    run: Run
    process: subprocess.Popen[bytes]
    since: float
    threads: int
    record: Path
    output: Path


def threads_of(run: Run, jobs: int) -> int:
    """Threads of each worker, so that all runs together have no more than there are cores."""
    if "threads" in run.options:
        return int(run.options["threads"])
    return max(1, cores() // (jobs * int(run.settings["workers"])))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def carry_out(runs: Sequence[Run], *, jobs: int = 1, train: Sequence[str] = TRAIN) -> Generator[Result, None, None]:
    """Yield what comes of the runs as they end. Whatever ends this, no training outlives it."""
    waiting = list(reversed(runs))
    running: list[_Started] = []
    with tempfile.TemporaryDirectory(prefix="thinpipe-ablate-") as folder, _ended_afterwards(running):
        while waiting or running:
            while waiting and len(running) < jobs:
                number = len(runs) - len(waiting)
                running.append(_start(waiting.pop(), jobs, train, Path(folder) / str(number)))
            ended = [started for started in running if started.process.poll() is not None]
            for started in ended:
                running.remove(started)
                yield _result(started, jobs)
            if not ended:
                time.sleep(_POLL_S)


def _start(run: Run, jobs: int, train: Sequence[str], stem: Path) -> _Started:
    threads = threads_of(run, jobs)
    record, output = stem.with_suffix(".json"), stem.with_suffix(".txt")
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*train, *run.arguments(), "--json", str(record)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            process_group=0,  # Ctrl-C is ours to pass on, to it and its workers together
            preexec_fn=end_with_parent,
        )
    return _Started(run, process, time.monotonic(), threads, record, output)


def _result(started: _Started, jobs: int) -> Result:
    figures = figures_of(started.record) if started.process.returncode == 0 else {}
    error = None if figures else last_error(started.process.returncode, started.output)
    started.record.unlink(missing_ok=True)
    started.output.unlink(missing_ok=True)
    return Result(
        name=started.run.name,
        settings=started.run.settings,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        wall_s=time.monotonic() - started.since,
        threads=started.threads,
        jobs=jobs,
        error=error,
        **figures,
    )


@contextmanager
def _ended_afterwards(running: Sequence[_Started]) -> Iterator[None]:
    """End what still runs: as Ctrl-C would, then for good."""
    try:
        yield
    finally:
        for started in running:
            _signal(started, signal.SIGINT)
        until = time.monotonic() + _PATIENCE_S
        try:
            for started in running:
                started.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when somebody presses Ctrl-C again
            for started in running:
                _signal(started, signal.SIGKILL)
                started.process.wait()


def _signal(started: _Started, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # nobody of it is left
        os.killpg(started.process.pid, number)
