"""A pool of worker processes that is started once and runs many small jobs, each under a time limit."""

from __future__ import annotations

import multiprocessing.util
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# By the process that workers are forked from: four of them that import all of it take twenty seconds.
PRELOADED = [
    "thinpipe.launch.preload",
    "tests.compiled",
    "transformers.models.llama.modeling_llama",
    "tests.train.toy",
]
LIMIT_S = 150  # a combination takes a fraction of a second; importing torch in all workers, on two busy cores, thirty


class Pool:
    """``run(function, workers, ...)`` calls ``function(group, ...)`` on the first so many workers, in one group."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        multiprocessing.util.get_temp_dir()  # for all: a folder of a worker's own would stay, since it is killed
        self._rendezvous = tempfile.NamedTemporaryFile(prefix="thinpipe-test-")  # noqa: SIM115
        self._ends: list[Connection] = []
        self.processes = []
        for worker in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(worker, workers, self._rendezvous.name, theirs), daemon=True)
            process.start()
            self._ends.append(mine)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], workers: int, *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """The results of all workers. A worker that raises or is late fails the test and ends the pool."""
        for end in self._ends[:workers]:
            end.send((function, workers, args))
        results = []
        for worker, end in enumerate(self._ends[:workers]):
            if not end.poll(limit_s):
                self.close()
                raise TimeoutError(f"worker {worker} of {workers} did not finish {function.__name__}{args}")
            error, result = end.recv()
            if error:
                self.close()
                raise RuntimeError(f"worker {worker} of {workers} failed in {function.__name__}{args}:\n{error}")
            results.append(result)
        return results

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(worker: int, workers: int, rendezvous: str, end: Connection) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(rendezvous, workers),
        rank=worker,
        world_size=workers,
        timeout=timedelta(seconds=LIMIT_S),
    )
    groups = {count: dist.new_group(list(range(count))) for count in range(1, workers + 1)}
    while True:
        function, count, args = end.recv()
        torch.manual_seed(0)
        try:
            end.send((None, function(groups[count], *args)))
        except BaseException:
            end.send((traceback.format_exc(), None))
