"""Thin networks: rates are read, links are shaped at both ends, and nothing is left behind whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from thinpipe.workers.launch import WorkerError, run_workers
from thinpipe.workers.network import (
    check_links,
    link_text,
    missing_for_networks,
    parse_link,
    parse_links,
    thin_network,
)

ROOT = Path(__file__).parents[2]
needs_namespaces = pytest.mark.skipif(missing_for_networks() is not None, reason=f"no {missing_for_networks()} here")

BYTES = 250_000
HOLD = """
import sys, time
from thinpipe.workers.network import thin_network
with thin_network(100, workers=2) as network:
    print(*network.namespaces, flush=True)
    time.sleep(60)
"""


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line}


def shown(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def hold_network() -> tuple[subprocess.Popen[str], set[str]]:
    """A process that holds a network of two, and its namespaces."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    return process, set(process.stdout.readline().split())


@pytest.mark.parametrize(
    ("text", "mbit_per_s"),
    [("100mbit", 100.0), ("1gbit", 1000.0), ("2.5Gbit", 2500.0), ("500kbit", 0.5), ("25", 25.0), ("none", None)],
)
def test_rates_are_read_and_written(text: str, mbit_per_s: float | None) -> None:
    assert parse_link(text) == mbit_per_s
    assert parse_link(link_text(mbit_per_s)) == mbit_per_s


@pytest.mark.parametrize(
    "text",
    ["", "fast", "0mbit", "-1mbit", "10mb", "10 mbit/s", "100mbit,", "1e30gbit", "601gbit", "9" * 400, "0.0000001kbit"],
)
def test_what_is_no_rate_is_an_error_that_says_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="link is a rate from 1kbit to 600gbit"):
        parse_links(text)


def test_a_list_of_rates() -> None:
    assert parse_links("10mbit, 1gbit,none,10mbit") == [10.0, 1000.0, None]


@pytest.mark.parametrize(
    ("user", "commands", "lacks"), [(1000, True, "no root"), (0, False, "no `ip` of iproute2 and `tc` of iproute2")]
)
def test_says_what_a_machine_lacks(user: int, commands: bool, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("shutil.which", lambda name: name if commands else None)
    with pytest.raises(ValueError, match=f"needs Linux, root, and ip and tc of iproute2; here is {lacks}"):
        check_links([None, 100.0])
    check_links([None])  # nothing to shape, nothing needed


@needs_namespaces
@pytest.mark.parametrize("workers", [2, 3])
def test_every_end_is_shaped_and_everything_goes_away(workers: int) -> None:
    with suppress(KeyError), thin_network(100, workers) as network:
        assert network is not None
        mine = network.namespaces[0].rpartition("-")[0]
        made = {name for name in namespaces() if name.startswith(mine)}
        assert set(network.namespaces) <= made
        ends = [line for name in made for line in shown(["tc", "-n", name, "qdisc"]).splitlines() if "tbf" in line]
        assert len(ends) == (2 if workers == 2 else 2 * workers)
        assert all("rate 100Mbit" in end for end in ends)
        raise KeyError
    assert not made & namespaces()


@needs_namespaces
def test_networks_of_one_process_do_not_meet() -> None:
    with thin_network(100, 2) as one, thin_network(10, 2) as other:
        assert one is not None
        assert other is not None
        assert not set(one.namespaces) & set(other.namespaces)
        assert "rate 100Mbit" in shown(one.command(0, "tc", "qdisc"))
        assert "rate 10Mbit" in shown(other.command(0, "tc", "qdisc"))


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_that_ask_leave_nothing(number: signal.Signals) -> None:
    process, names = hold_network()
    assert len(names & namespaces()) == 2
    process.send_signal(number)
    assert process.wait(timeout=30) != 0
    assert not names & namespaces()


@needs_namespaces
@pytest.mark.rate
def test_what_a_killed_process_leaves_goes_with_the_next_network_and_others_stay() -> None:
    (killed, left), (alive, held) = hold_network(), hold_network()
    try:
        killed.kill()
        killed.wait()
        assert left <= namespaces()
        with thin_network(100, 2):
            now = namespaces()
        assert not left & now
        assert held <= now
    finally:
        alive.terminate()
        alive.wait()


def send_around() -> tuple[float, str]:
    """Every worker sends to the next one; the seconds it took all of them, and the machine this one counts as."""
    worker, workers = dist.get_rank(), dist.get_world_size()
    mine, its = torch.full((BYTES,), worker, dtype=torch.uint8), torch.empty(BYTES, dtype=torch.uint8)
    dist.barrier()
    began = time.perf_counter()
    works = [dist.irecv(its, (worker - 1) % workers), dist.isend(mine, (worker + 1) % workers)]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    took = time.perf_counter() - began
    assert its.eq((worker - 1) % workers).all()
    return took, os.environ["GROUP_RANK"]


@needs_namespaces
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_in_a_network_pass_its_links(workers: int) -> None:
    with thin_network(10, workers) as network:
        results = run_workers(send_around, workers=workers, network=network)
    assert [machine for _, machine in results] == [str(worker) for worker in range(workers)]
    for took, _ in results:
        assert took > 0.9 * BYTES * 8 / 10e6  # a burst of 8 kB passes at once, the rest at the rate


def fail() -> None:
    raise KeyError("a worker that fails")


@needs_namespaces
def test_a_worker_that_fails_ends_the_network_too() -> None:
    with pytest.raises(WorkerError, match="a worker that fails"), thin_network(10, 2) as network:
        run_workers(fail, workers=2, network=network)
    assert network is not None
    assert not set(network.namespaces) & namespaces()
