"""One worker has process groups over several networks, and each carries its own traffic."""

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from thinpipe.lab.bench.pipeline.pipeline_options import Variant
from thinpipe.lab.bench.pipeline.worlds import make_worlds, networks_of, place
from thinpipe.lab.netem.network import INTERFACE, missing_for_networks
from thinpipe.launch.workers import run_workers
from thinpipe.train.engines.world import join_world
from thinpipe.train.shaping import parse_link, shaping_of

BYTES = 200_000
RUNS = [Variant(workers=workers, link=link, parallel="data") for workers in (2, 3) for link in (shaping_of(50), None)]


def sent_bytes():
    """Return the bytes that left through the shaped interface of this namespace; None where there is none."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return None


def send_over_each(networks):
    world = join_world("cpu", threads=1)
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    worlds = make_worlds(world, RUNS, networks)
    assert (sent_bytes(), os.environ["GLOO_SOCKET_IFNAME"]) == (None, interface)  # it is back where it started
    grown = {}
    for run in RUNS:
        if world.worker >= run.workers:
            continue
        before = seen(networks, world.worker)
        one = worlds[place(run)]
        assert (one.worker, one.workers, dist.get_world_size(one.group)) == (world.worker, run.workers, run.workers)
        dist.all_reduce(torch.ones(BYTES // 4), group=one.group)
        dist.barrier(one.group)
        after = seen(networks, world.worker)
        grown[place(run)] = {each for each in after if after[each] - before[each] > BYTES / 2}
    dist.barrier()
    return grown


def seen(networks, worker):
    found = {}
    for each, network in networks.by_place.items():
        if worker < each[0]:
            with network.visit(worker):
                found[each] = sent_bytes()
    return found


@pytest.mark.skipif(missing_for_networks() is not None, reason=f"no {missing_for_networks()} here")
def test_every_group_sends_through_its_own_network():
    with networks_of(RUNS) as networks:
        prefix = networks.by_place[2, shaping_of(50)].namespaces[0].rpartition("-")[0]
        results = run_workers(send_over_each, networks, workers=3, network=networks, backend="gloo")
    for worker, grown in enumerate(results):
        expected = {place(run): {place(run)} if run.link else set() for run in RUNS if worker < run.workers}
        assert grown == expected
    assert prefix not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_no_shaped_link_is_no_network():
    with networks_of([Variant(workers=2, parallel="data")]) as networks:
        assert networks is None


@pytest.mark.skipif(missing_for_networks(parse_link("1ms")) is not None, reason="no root or no /dev/net/tun here")
def test_a_forwarder_that_ends_is_seen():
    runs = [Variant(workers=2, link=parse_link(f"{delay}ms"), parallel="data") for delay in (1, 2)]
    with networks_of(runs) as networks:
        poll = select.poll()
        poll.register(networks.broken, select.POLLIN)
        assert poll.poll(0) == []
        prefix = networks.by_place[2, parse_link("2ms")].namespaces[0].rpartition("-")[0]
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        (forwarder,) = [int(child) for child in children if prefix in Path(f"/proc/{child}/cmdline").read_text()]
        os.kill(forwarder, signal.SIGKILL)
        assert poll.poll(20_000)
