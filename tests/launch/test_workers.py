"""Workers: started or joined, and ended together when one of them fails, dies or disagrees."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.pipeline.scenario import train
from tests.preloaded import Program
from tests.processes import local_workers
from tests.scripts import run_script, running
from thinpipe.comm.control import GRACE_S
from thinpipe.comm.errors import WorkerError
from thinpipe.launch.workers import run_workers

SCENARIO = str(Path(__file__).parent.parent / "pipeline" / "scenario.py")


def rank_and_size(factor: int, private: str = "nothing") -> tuple[int, int, str]:
    return dist.get_rank() * factor, dist.get_world_size(), private


def test_starts_local_workers_and_returns_their_results() -> None:
    results = run_workers(rank_and_size, 10, workers=2, private="the client's")
    assert results == [(0, 2, "the client's"), (10, 2, "nothing")]


def test_workers_have_the_environment_of_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that forks them may have started long before."""
    run_workers(os.getenv, "THINPIPE_DEBUG", workers=1)
    monkeypatch.setenv("THINPIPE_DEBUG", "1")
    assert run_workers(os.getenv, "THINPIPE_DEBUG", workers=2) == ["1", "1"]


def test_workers_of_a_killed_process_end() -> None:
    """They hang in a receive that never comes, where Python sees no signal."""
    wait = "import torch, torch.distributed as dist; print('!', end='', flush=True); dist.recv(torch.empty(1))"
    code = f"from thinpipe.launch.workers import run_workers; run_workers(exec, {wait!r}, workers=2)"
    process = Program("-c", code, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.read(2) == "!!"  # both are there
        process.kill()
        process.wait()
        patience = time.monotonic() + GRACE_S + 20
        while (left := running(process.pid)) and time.monotonic() < patience:
            time.sleep(0.2)
        assert not left
    finally:
        if running(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def listening(*, beyond_loopback: bool) -> int:
    """How many TCP ports this process has open; with ``beyond_loopback`` those that other machines could reach."""
    mine = {
        os.readlink(path).removeprefix("socket:[")[:-1] for path in Path("/proc/self/fd").iterdir() if path.exists()
    }
    count = 0
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, state, inode = (line.split()[column] for column in (1, 3, 9))
            local = address.split(":")[0]
            is_loopback = local.endswith("0100007F") or local == "00000000000000000000000001000000"
            count += state == "0A" and inode in mine and not (beyond_loopback and is_loopback)
    return count


def ports_of_a_worker() -> tuple[int, int]:
    dist.barrier()
    return listening(beyond_loopback=False), listening(beyond_loopback=True)


def test_nothing_listens_beyond_loopback() -> None:
    """Neither the workers, whose gloo has a port each, nor this process, which started them."""
    os.environ["GLOO_SOCKET_IFNAME"] = "any"  # what a user set for several machines does not open this one
    try:
        before = listening(beyond_loopback=False)
        for ports, open_to_others in run_workers(ports_of_a_worker, workers=2):
            assert ports >= 1
            assert open_to_others == 0
        assert listening(beyond_loopback=False) == before
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def test_a_missing_number_of_workers_is_an_error() -> None:
    with pytest.raises(ValueError, match="the number of workers is 1 or more, got None"):
        run_workers(rank_and_size, 10)


def test_a_script_ends_with_its_workers() -> None:
    code, output = run_script(SCENARIO, "die")
    assert code != 0
    assert "worker 1: killed by signal 9 (SIGKILL); worker 0 ended with it" in output, output


def test_a_server_that_is_killed_is_named() -> None:
    kill = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"
    code, output = run_script(
        "-c", f"from thinpipe.launch.workers import run_workers; run_workers(exec, {kill!r}, workers=2)"
    )
    assert code != 0
    assert "WorkerError: the process that forks workers was killed, and all workers ended with it" in output, output


@pytest.mark.parametrize(
    ("scenario", "messages"),
    [
        pytest.param("raise", ["worker 1: ", "this stage is broken", "worker 0 ended with it"], id="raise"),
        pytest.param("flip", ["worker 1: chunk 1 of step 3 over the forward link from stage 0 to stage 1"], id="flip"),
        pytest.param("disagree", ['forward codec: "uniform:8" on worker 0; "uniform:4" on worker 1'], id="disagree"),
    ],
)
def test_one_failure_ends_all_with_its_cause(scenario: str, messages: list[str]) -> None:
    with pytest.raises(WorkerError) as error:
        run_workers(train, scenario, workers=2)
    assert not local_workers()
    for message in messages:
        assert message in str(error.value)
