"""Execution of ablation runs: several at a time, each a ``thinpipe train`` in its own process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from thinpipe.comm.signals import end_with_parent
from thinpipe.lab.ablation.plan import Run
from thinpipe.lab.ablation.results import Result
from thinpipe.lab.records.record import Record
from thinpipe.links.link_codec import warm_codec
from thinpipe.links.registry import link_codec
from thinpipe.options import flag
from thinpipe.train import data
from thinpipe.train.running import check_devices
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.tasks import task

TRAIN = (sys.executable, "-m", "thinpipe", "train")  # not the console script: it may not be installed
_POLL_S = 0.05
REPORT_S = 600.0  # interval between progress reports
_DETAILS = ("links", "workers", "epochs")  # lists in the row of a record that tables do not show
_NEEDED = ("metric", "validation_loss", "train_loss")
_WARM_SHAPE = (16, 16, 256)  # enough for codecs to take the code path of large tensors
_PATIENCE_S = 30  # for a run to end after SIGINT: it finishes its step and its workers exit


@dataclass(frozen=True)
class _Started:
    run: Run
    process: subprocess.Popen[bytes]
    since: float
    threads: int
    record: Path
    output: Path

    def state(self) -> str:
        """Return a status line of a run that has not ended: its running time and the last line of its output."""
        lines = self.output.read_text(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output yet")
        return f"{self.run.name}: running for {(time.monotonic() - self.since) / 60:.0f} min; {last}"


def check_possible(plan: Path, runs: Sequence[Run]) -> None:
    """Raise ValueError for the first run that thinpipe train would reject: no data, no GPU, too many workers."""
    checked: set[str] = set()
    for run in runs:
        settings = Settings.from_json({"threads": None, **{k: v for k, v in run.settings.items() if k != "steps"}})
        requirements = repr((settings.task, settings.source, settings.parallel, settings.workers, settings.layout,
                             settings.client_layers, settings.batch_size, settings.device))  # fmt: skip
        if requirements in checked:  # codecs and seeds make no difference, and checking data sets is slow
            continue
        checked.add(requirements)
        try:
            check_devices(settings.devices)
            data.check_possible(task(settings.task), settings)
        except ValueError as error:
            raise ValueError(f"{plan}: the run {run.name!r}: {error}") from None


def compile_kernels(runs: Sequence[Run]) -> None:
    """Encode and decode once with each codec of the runs on the CPU, to fill numba's cache on disk.

    Otherwise the first runs all compile, and their speed includes the compilation.
    """
    cpu = torch.device("cpu")
    on_cpu = [run.settings for run in runs if run.settings["device"] == "cpu" or not torch.cuda.is_available()]
    for spec in {str(settings[f"compress_{side}"]) for settings in on_cpu for side in ("forward", "backward")}:
        for used in link_codec(spec).codecs:
            warm_codec(used, _WARM_SHAPE, torch.float32, cpu)


def load_text(runs: Sequence[Run], jobs: int) -> str:
    """Return the processes, threads and cores that runs use, with a warning if there are too few cores."""
    processes = max(map(processes_of, runs))
    threads = min(threads_of(run, jobs) for run in runs)
    each = f"{processes} process{'es' * (processes > 1)} each"
    text = f"{jobs} at a time, {each}, OMP_NUM_THREADS={threads}, {cores()} cores"
    return text if jobs * processes * threads <= cores() else f"{text}: too few cores, so speeds are lower"


def threads_of(run: Run, jobs: int) -> int:
    """Return the threads of each worker, such that all concurrent runs together use no more than all cores."""
    if "threads" in run.options:
        return int(run.options["threads"])
    return max(1, cores() // (jobs * processes_of(run)))


def processes_of(run: Run) -> int:
    """Return the number of processes of a run that compute: its workers, or 1 if it runs in process."""
    return 1 if run.options.get("in-process") else int(run.settings["workers"])


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def carry_out(
    runs: Sequence[Run],
    *,
    jobs: int = 1,
    train: Sequence[str] = TRAIN,
    report: Callable[[str], None] = lambda line: None,
) -> Generator[Result, None, None]:
    """Run all, at most ``jobs`` at a time, and yield the results as runs end. On exit, terminate all runs.

    ``report`` is called with a status line of each active run every REPORT_S seconds.
    """
    waiting = list(reversed(runs))
    reported_at = time.monotonic()
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
            if time.monotonic() - reported_at >= REPORT_S:
                reported_at = time.monotonic()
                for started in running:
                    report(started.state())


def _start(run: Run, jobs: int, train: Sequence[str], stem: Path) -> _Started:
    threads = threads_of(run, jobs)
    record, output = stem.with_suffix(".json"), stem.with_suffix(".txt")
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*train, *run.arguments(), flag("json"), str(record)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            process_group=0,  # this process forwards Ctrl-C to the run and its workers together
            preexec_fn=end_with_parent,
        )
    return _Started(run, process, time.monotonic(), threads, record, output)


def _result(started: _Started, jobs: int) -> Result:
    metrics = metrics_of(started.record) if started.process.returncode == 0 else {}
    error = None if metrics else last_error(started.process.returncode, started.output)
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
        **metrics,
    )


@contextmanager
def _ended_afterwards(running: Sequence[_Started]) -> Iterator[None]:
    """On exit, terminate all active runs: SIGINT first, SIGKILL after _PATIENCE_S."""
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
        finally:  # also after a second Ctrl-C
            for started in running:
                _signal(started, signal.SIGKILL)
                started.process.wait()


def _signal(started: _Started, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all its processes have exited
        os.killpg(started.process.pid, number)


def metrics_of(record: Path) -> dict[str, Any]:
    """Return the fields of a Result that a record fills; empty if there is no record with finite metrics."""
    try:
        read = Record.read(record)
    except ValueError:
        return {}
    row = read.rows[0] if read.rows else {}
    if not all(isinstance(row.get(name), int | float) and math.isfinite(row[name]) for name in _NEEDED):
        return {}
    metric = next((column for column in read.columns if column.name == "metric"), None)
    if metric is None:
        return {}
    return {
        "row": {name: value for name, value in row.items() if name not in _DETAILS},
        "metric": metric.heading,
        "metric_format": metric.format,
        "metric_better": metric.better or "higher",
        "environment": read.environment,
        "thinpipe": read.thinpipe,
    }


def last_error(code: int, output: Path) -> str:
    """Return the last error message in a run's output, or how its process ended."""
    if code == 0:
        return "ended without finite metrics"
    ending = f"killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    errors = [place for place, line in enumerate(lines) if line.startswith("thinpipe: ")]
    if errors:  # an error that ends with a colon continues on the next line
        text = lines[errors[-1]].removeprefix("thinpipe: ")
        return " ".join([text, *lines[errors[-1] + 1 : errors[-1] + 2]]) if text.endswith(":") else text
    return f"{ending}: {lines[-1]}" if lines else ending
