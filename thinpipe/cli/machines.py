"""Options of benchmarks that run on several machines."""

from __future__ import annotations

from dataclasses import dataclass

from thinpipe.cli.command_runner import MachineOptions, join_machines
from thinpipe.lab.bench.inputs import HOW
from thinpipe.options import like


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The rank of this worker and the address of worker 0, as in ``thinpipe train``."""

    rank: int | None = like(MachineOptions, "rank", panel=HOW, default=None)
    master: str | None = like(MachineOptions, "master", panel=HOW, default=None)

    def join(self, workers: int | None) -> None:
        """Make this process one of ``workers`` on several machines, if the options are given."""
        join_machines(self.rank, self.master, workers)
