"""Two replicas on one machine with a thin link between them: the same command again, on either side of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from thinpipe.bench.slow_link import can_shape, slow_link

PORT = 29718  # inside namespaces of our own, where every port is free
REPLICAS = 2


def check_link(workers: int | None) -> None:
    """ValueError where no link can be made."""
    if workers not in (None, REPLICAS):
        raise ValueError(f"--link joins {REPLICAS} replicas on this machine; leave out --workers {workers}")
    if not can_shape():
        raise ValueError("--link shapes traffic between network namespaces: it needs Linux, root, and ip and tc")


def run_over_link(arguments: Sequence[str], mbit_per_s: float) -> int:
    """Run ``thinpipe ARGUMENTS`` on both sides, each under torchrun as on a machine of its own; the exit code."""
    with slow_link(mbit_per_s) as sides:
        processes = [
            subprocess.Popen(
                side.command(
                    sys.executable,
                    *("-m", "torch.distributed.run", f"--nnodes={REPLICAS}", f"--node-rank={rank}"),
                    *("--nproc-per-node=1", f"--master-addr={sides[0].address}", f"--master-port={PORT}"),
                    *("-m", "thinpipe", *arguments),
                ),
                env=os.environ | {"GLOO_SOCKET_IFNAME": side.interface},
            )
            for rank, side in enumerate(sides)
        ]
        try:
            return max(abs(process.wait()) for process in processes)
        finally:
            for process in processes:
                process.terminate()
                process.wait()
