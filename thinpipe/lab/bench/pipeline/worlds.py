"""The process groups and emulated networks of all rows: one set of worker processes, a process group per link.

    worker 0 ---- loopback ---- worker 1      default group: barriers and measurements
             ==== 100 Mbit/s ====             a group that was created in the namespaces of this network
             ==== 10 Mbit/s =====             another one

A socket stays in the network namespace where it was opened. So a worker enters the namespace of each network, opens a
process group there, and returns; rows over different links can then alternate step by step in the same processes.
"""

from __future__ import annotations

import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

from thinpipe.comm.backend import new_group
from thinpipe.comm.group import Group
from thinpipe.lab.bench.pipeline.pipeline_options import Variant
from thinpipe.lab.netem.network import Network, thin_network
from thinpipe.train.engines.world import World
from thinpipe.train.shaping import Shaping

Place = tuple[int, Shaping | None]  # a number of workers and the link between them


@dataclass(frozen=True)
class Networks:
    """The networks of all rows; workers start in the default namespace and enter them to connect."""

    by_place: Mapping[Place, Network]
    broken: int | None = None  # a file descriptor: readable when the links of a network are down

    def enter(self, worker: int) -> None:
        """Do nothing: the default group is on loopback."""


def place(variant: Variant) -> Place:
    return variant.workers, variant.link


@contextmanager
def networks_of(variants: Sequence[Variant]) -> Iterator[Networks | None]:
    """Create a network for each number of workers and shaped link; None if no link is shaped."""
    with ExitStack() as stack:
        found = {
            each: network
            for each in dict.fromkeys(map(place, variants))
            if (network := stack.enter_context(thin_network(each[1], each[0]))) is not None
        }
        broken = None
        forwarders = [network.broken for network in found.values() if network.broken is not None]
        if forwarders:
            any_of_them = stack.enter_context(select.epoll())
            for forwarder in forwarders:
                any_of_them.register(forwarder)
            broken = any_of_them.fileno()
        yield Networks(found, broken) if found else None


def make_worlds(world: World, variants: Sequence[Variant], networks: Networks | None) -> dict[Place, World]:
    """Open the process groups of all rows on this worker. A collective of all workers."""
    found = {}
    for each in dict.fromkeys(map(place, variants)):
        workers, link = each
        if link is None and workers == world.workers:
            found[each] = world
            continue
        network = None if networks is None else networks.by_place.get(each)
        takes_part = network is not None and world.worker < workers
        with network.visit(world.worker) if network is not None and takes_part else nullcontext():
            group = new_group(range(workers))
        found[each] = replace(world, workers=workers, group=group, control=Group.of(group))
    return found
