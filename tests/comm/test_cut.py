"""Links that are cut: short cuts are survived however many they are, one for good ends the run at its patience."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from thinpipe.comm.control import LATE_S
from thinpipe.comm.errors import WorkerError
from thinpipe.lab.netem.network import INTERFACE, Network, missing_for_networks, thin_network
from thinpipe.launch.workers import run_workers

PATIENCE_S = 6.0
LIMIT_S = 120  # for what takes some seconds

pytestmark = [
    pytest.mark.skipif(missing_for_networks() is not None, reason=f"no {missing_for_networks()} here"),
    pytest.mark.timeout(2 * LIMIT_S),
]


def exchange(folder: str) -> int:
    """Send numbers to each other until a file requests the end; return how many were exchanged."""
    count = torch.zeros(1)
    while True:
        over = torch.tensor([float(Path(folder, "over").exists())])
        dist.all_reduce(over)
        if over:
            return int(count)
        count += 1
        Path(folder, "began").touch()
        time.sleep(0.05)


class Job:
    """A run in a thread, and what came of it."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.results: list[int] = []
        self.error = ""
        self._given = network, folder
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until = time.monotonic() + LIMIT_S
        while not (folder / "began").exists() and time.monotonic() < until:
            time.sleep(0.05)

    def _run(self) -> None:
        network, folder = self._given
        try:
            self.results = run_workers(exchange, str(folder), workers=2, network=network, patience_s=PATIENCE_S)
        except WorkerError as error:
            self.error = str(error)

    def wait(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the run has not ended"


def set_link(network: Network, state: str) -> None:
    subprocess.run(["ip", "-n", network.namespaces[1], "link", "set", INTERFACE, state], check=True)


def test_many_short_cuts_are_survived(tmp_path: Path) -> None:
    with thin_network(100, workers=2) as network:
        assert network is not None
        job = Job(network, tmp_path)
        for _ in range(5):  # in all longer than the patience
            set_link(network, "down")
            time.sleep(1.5)
            set_link(network, "up")
            time.sleep(1.0)
        (tmp_path / "over").touch()
        job.wait()
    assert job.error == ""
    assert job.results[0] == job.results[1] > 0


def test_a_cut_for_good_ends_the_run_at_its_patience(tmp_path: Path) -> None:
    with thin_network(100, workers=2) as network:
        assert network is not None
        job = Job(network, tmp_path)
        set_link(network, "down")
        job.wait()
    silent = [f"has been silent for {PATIENCE_S + late:.0f} s" for late in (LATE_S, LATE_S + 1, LATE_S + 2)]
    assert any(message in job.error for message in silent), job.error
