"""A thin link on one machine: two network namespaces, joined by a pair of interfaces that let only so much through.

Needs root, iproute2 and Linux. The namespaces have names of their own and go away with the context.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# What the shaper lets through at once. Above one segment, or nothing passes; far below a message, or nothing is shaped.
BURST_KB = 64


@dataclass(frozen=True)
class Side:
    """One end of the link: a place to run a process."""

    namespace: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]


def can_shape() -> bool:
    return os.name == "posix" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


@contextmanager
def slow_link(mbit_per_s: float) -> Iterator[tuple[Side, Side]]:
    """Two sides with a link of this rate in each direction between them."""
    ends = (
        Side(f"thinpipe-{os.getpid()}-a", f"tpa{os.getpid()}", "10.213.77.1"),
        Side(f"thinpipe-{os.getpid()}-b", f"tpb{os.getpid()}", "10.213.77.2"),
    )
    made = []
    try:
        for end in ends:
            _run("ip", "netns", "add", end.namespace)
            made.append(end)
        here, there = ends
        _run("ip", "link", "add", here.interface, "netns", here.namespace, "type", "veth",
             "peer", "name", there.interface, "netns", there.namespace)  # fmt: skip
        for end in ends:
            _run(*end.command("ip", "address", "add", f"{end.address}/24", "dev", end.interface))
            for interface in ("lo", end.interface):
                _run(*end.command("ip", "link", "set", interface, "up"))
            _run(*end.command("tc", "qdisc", "add", "dev", end.interface, "root", "tbf",
                              "rate", f"{mbit_per_s}mbit", "burst", f"{BURST_KB}kb", "latency", "50ms"))  # fmt: skip
        yield ends
    finally:
        for end in made:
            _run("ip", "netns", "delete", end.namespace)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
