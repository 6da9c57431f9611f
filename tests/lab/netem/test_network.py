"""Thin networks: links are shaped, by the kernel or a forwarder, and nothing is left behind whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.preloaded import Program
from tests.processes import processes_of
from thinpipe.lab.netem import network
from thinpipe.lab.netem.network import Network, check_links, missing_for_networks, thin_network
from thinpipe.launch.workers import WorkerError, run_workers
from thinpipe.train.shaping import parse_link, shaping_of

ROOT = Path(__file__).parents[3]
LACKS = missing_for_networks(parse_link("1ms"))
needs_namespaces = pytest.mark.skipif(LACKS is not None, reason=f"no {LACKS} here")

BYTES = 250_000
HOLD = """
import sys, time
from thinpipe.lab.netem.network import thin_network
from thinpipe.train.shaping import parse_link
with thin_network(parse_link(sys.argv[1]), workers=2) as one, thin_network(parse_link(sys.argv[2]), workers=2) as other:
    print(*one.namespaces, *other.namespaces, flush=True)
    if "busy" in sys.argv:
        from thinpipe.launch.workers import run_workers
        # In one piece, or two workers write both lines before both line ends.
        work = "import os, time; os.write(1, b'here' + bytes([10])); time.sleep(60)"
        run_workers(exec, work, workers=2, network=other)
    time.sleep(60)
"""
KINDS = ("100mbit", "100mbit/20mbit,5ms,1%")  # shaped by the kernel, and by a forwarder


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line}


def shown(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shown_inside(network: Network, *command: str) -> str:
    """Return the output of a command in the namespace of worker 0."""
    return shown("ip", "netns", "exec", network.namespaces[0], *command)


def hold_networks(busy: bool = False) -> tuple[subprocess.Popen[str], set[str]]:
    """A process that holds a network of either kind, with workers in one if that is busy, and their namespaces."""
    process = Program("-c", HOLD, *KINDS, *(["busy"] if busy else []), stdout=subprocess.PIPE)
    assert process.stdout is not None
    names = set(process.stdout.readline().split())
    for _ in range(2 if busy else 0):
        assert process.stdout.readline() == "here\n"
    return process, names


def forwarders(launcher: int) -> list[int]:
    """The processes that hold the networks of a process."""
    return [found.pid for found in processes_of(-1, f"forwarder.py thinpipe-{launcher}-")]


def wait_until_gone(launcher: int, names: set[str]) -> None:
    deadline = time.monotonic() + 30
    while forwarders(launcher) or names & namespaces():
        assert time.monotonic() < deadline, "a network is still there"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("user", "commands", "lacks"), [(1000, True, "no root"), (0, False, "no `ip` of iproute2 and `tc` of iproute2")]
)
def test_missing_tools_are_named(user: int, commands: bool, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("shutil.which", lambda name: name if commands else None)
    with pytest.raises(ValueError, match=f"needs Linux, root, and ip and tc of iproute2; here is {lacks}"):
        check_links([None, shaping_of(100.0)])
    check_links([None])  # nothing to shape, nothing needed


@needs_namespaces
@pytest.mark.parametrize("workers", [2, 3])
def test_every_end_is_shaped_and_everything_is_removed(workers: int) -> None:
    with suppress(KeyError), thin_network(100, workers) as thin:
        assert thin is not None
        mine = thin.namespaces[0].rpartition("-")[0]
        made = {name for name in namespaces() if name.startswith(mine)}
        assert set(thin.namespaces) <= made
        ends = [line for name in made for line in shown("tc", "-n", name, "qdisc").splitlines() if "tbf" in line]
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
        assert "rate 100Mbit" in shown_inside(one, "tc", "qdisc")
        assert "rate 10Mbit" in shown_inside(other, "tc", "qdisc")


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_leave_no_network(number: signal.Signals) -> None:
    process, names = hold_networks(busy=number == signal.SIGINT)
    assert len(names & namespaces()) == 4
    side_inputs = forwarders(process.pid)
    assert len(side_inputs) == 2
    for pid in side_inputs:
        os.kill(pid, number)  # a terminal sends it to both, and workers still need the links to stop together
    process.send_signal(number)
    assert process.wait(timeout=30) != 0
    assert not names & namespaces()
    assert forwarders(process.pid) == []


@needs_namespaces
def test_a_killed_process_leaves_nothing_and_others_stay() -> None:
    (killed, left), (alive, held) = hold_networks(busy=True), hold_networks()
    try:
        killed.kill()
        killed.wait()
        wait_until_gone(killed.pid, left)
        assert killed.stdout is not None
        assert killed.stdout.read() == ""  # nobody holds it: its workers have ended
        assert held <= namespaces()
        assert len(forwarders(alive.pid)) == 2
    finally:
        alive.terminate()
        alive.wait()


@needs_namespaces
@pytest.mark.rate
def test_leftovers_of_killed_processes_are_removed_with_the_next_network() -> None:
    process, left = hold_networks()
    for pid in forwarders(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
    assert left <= namespaces()
    with thin_network(100, 2):
        assert not left & namespaces()


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
@pytest.mark.parametrize(("link", "workers"), [("10mbit", 2), ("10mbit", 3), ("10mbit,1ms", 3)])
def test_workers_in_a_network_pass_its_links(link: str, workers: int) -> None:
    with thin_network(parse_link(link), workers) as thin:
        results = run_workers(send_around, workers=workers, network=thin)
    assert [machine for _, machine in results] == [str(worker) for worker in range(workers)]
    for took, _ in results:
        assert took > 0.9 * BYTES * 8 / 10e6  # a burst of 8 kB passes at once, the rest at the rate


def fail() -> None:
    raise KeyError("a worker that fails")


def lose_the_forwarder(launcher: int) -> None:
    if dist.get_rank() == 0:
        (side_inputs,) = forwarders(launcher)
        os.kill(side_inputs, signal.SIGKILL)
    dist.barrier()


@needs_namespaces
@pytest.mark.parametrize("link", KINDS)
def test_a_worker_that_fails_ends_the_network_too(link: str) -> None:
    with pytest.raises(WorkerError, match="a worker that fails"), thin_network(parse_link(link), 2) as thin:
        run_workers(fail, workers=2, network=thin)
    assert thin is not None
    assert not set(thin.namespaces) & namespaces()
    assert forwarders(os.getpid()) == []


@needs_namespaces
def test_a_forwarder_that_is_killed_ends_the_workers() -> None:
    message = "^the process that forwards what workers send to each other was killed, and the links are gone; start"
    with pytest.raises(WorkerError, match=message), thin_network(parse_link(KINDS[1]), 2) as thin:
        run_workers(lose_the_forwarder, os.getpid(), workers=2, network=thin)
    assert thin is not None
    assert not set(thin.namespaces) & namespaces()


@needs_namespaces
def test_one_line_if_devices_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_TUN", Path("/dev/net/none"))
    with pytest.raises(
        ValueError, match="and /dev/net/none for more than a rate; here is no /dev/net/none: run as root"
    ):
        check_links([parse_link(KINDS[1])])
    monkeypatch.undo()
    monkeypatch.setattr(network, "INTERFACE", "lo")  # which every namespace has: a device that is refused
    with pytest.raises(ValueError, match="forwards packets between TUN devices, which this machine does not allow: "):
        check_links([parse_link(KINDS[1])])
    assert forwarders(os.getpid()) == []


@needs_namespaces
def test_forwarded_links_have_their_own_rates(tmp_path: Path) -> None:
    """250 kB from worker 0 to worker 1 at 5 Mbit/s take 0.4 s, however fast the other pairs are."""
    path = tmp_path / "links.toml"
    path.write_text('default = "1gbit,1ms"\n"0-1" = "100mbit/5mbit,1ms"\n')
    with thin_network(parse_link(str(path)), 3) as thin:
        assert thin is not None
        routes = shown_inside(thin, "ip", "route")
        results = run_workers(send_around, workers=3, network=thin)
    assert "10.213.0.2 dev thinpipe scope link mtu 1500" in routes
    assert "10.213.0.3 " not in routes  # its packets are as large as the device takes
    for took, _ in results:
        assert took > 0.9 * BYTES * 8 / 5e6
