"""docs/many-machines.md, rehearsed: two agents of torchrun on loopback, a worker each, train as one machine does."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import Program
from tests.training.toy import Ears, run_toy
from thinpipe.measure.record import Record
from thinpipe.workloads.tasks import task

LIMIT_S = 120  # two steps of a tiny model; nearly all of it is starting Python and compiling codecs on busy cores
TINY = [
    *("--samples", "64", "--batch-size", "32", "--chunks", "2", "--epochs", "1"),
    *("--image-size", "16", "--threads", "1"),
]
PROGRAM = ["-m", "thinpipe", "train", *TINY]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_together(commands: list[list[str]], temporary: Path) -> list[tuple[str, str]]:
    """Output and errors of commands that need each other; all are ended if one fails or is late."""
    environment = os.environ | {"COLUMNS": "80", "TMPDIR": str(temporary)}  # torchrun leaves a folder
    processes = [Program(*each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) for each in commands]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # an agent ends its workers
        for process in processes:
            process.wait(timeout=30)
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return outputs


def processes_of(path: Path) -> list[str]:
    """The processes that were started with this path among their options."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(path).encode() in each.read_bytes():
                found.append(each.parent.name)
        except OSError:
            continue
    return found


def train_here(group) -> Ears:
    """The same run on two workers of one machine; what its client heard."""
    options = {"samples": 64, "batch_size": 32, "chunks": 2, "epochs": 1, "image_size": 16, "threads": 1}
    return run_toy(group, task("digits"), **options)


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_two_agents_train_as_one_machine_does(pool, tmp_path):
    path, port = tmp_path / "r.json", free_port()
    agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
    outputs = run_together([[*agent, str(rank), *PROGRAM, "--json", str(path)] for rank in (0, 1)], tmp_path)
    row = Record.read(path).rows[0]
    here = pool.run(train_here, 2)[0]
    assert row["parameters_sha256"] == here.end.parameters_sha256
    assert row["wire_bytes_per_step"] == here.steps[0].wire_bytes > 0
    assert row["steps"] == 2
    assert ["Result" in out for out, _ in outputs] == [True, False]  # --node-rank 0 is the client, which alone speaks
    assert processes_of(path) == []
