"""Several machines, one of which is asked to stop: all complete the same step, save it, and exit with the same code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_many_machines import free_port
from tests.preloaded import Program
from thinpipe.train.checkpoints.folder import checkpoints, newest
from thinpipe.train.checkpoints.manifest import read_manifest

LIMIT_S = 120
TINY = [
    *("--samples", "64", "--batch-size", "32", "--chunks", "2", "--epochs", "100000", "--lr-schedule", "constant"),
    *("--image-size", "16", "--threads", "1", "--keep", "2"),
]


@contextmanager
def machines(count: int, *options: str) -> Iterator[list[Program]]:
    """Start a worker for each of ``count`` machines; none is left behind."""
    port = free_port()
    started = [
        Program(
            *("-m", "thinpipe", "train", *options, "--workers", str(count), "--rank", str(rank)),
            *("--master", f"127.0.0.1:{port}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"COLUMNS": "80"},
        )
        for rank in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait(timeout=30)


def wait_for_checkpoint(saved: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not checkpoints(saved):
        assert time.monotonic() < until, "no checkpoint was written in time"
        time.sleep(0.05)


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGINT, 0), (signal.SIGHUP, 1)])
def test_one_is_signalled_and_all_stop_after_the_same_step(tmp_path: Path, number: signal.Signals, rank: int) -> None:
    saved, code = tmp_path / "run", 128 + number
    with machines(2, *TINY, "--save", str(saved), "--save-every", "3") as workers:
        wait_for_checkpoint(saved)
        os.kill(workers[rank].pid, number)
        outputs = [process.communicate(timeout=LIMIT_S) for process in workers]
        assert [process.returncode for process in workers] == [code, code], outputs
    text = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    stopped = re.search(r"stopped after step (\d+) of ", outputs[0][1])
    assert stopped is not None, outputs
    last = newest(saved)
    assert read_manifest(last).progress.step == int(stopped[1])
    for _, errors in outputs:
        assert f"thinpipe: worker {rank} was {text}\nthinpipe: the last checkpoint is {last}; " in errors, outputs
        assert "Traceback" not in errors
    again = ["--resume", str(saved), "--steps", str(int(stopped[1]) + 2)]
    with machines(2, *again) as workers:
        outputs = [process.communicate(timeout=LIMIT_S) for process in workers]
        assert [process.returncode for process in workers] == [0, 0], outputs
    assert f"goes on after step {stopped[1]} of " in outputs[0][0]
