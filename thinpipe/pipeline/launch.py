"""Starts local workers, or joins those that torchrun started; ends all when one dies."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing import ProcessExitedException

from thinpipe.pipeline.link import LinkError
from thinpipe.pipeline.parent import end_with_parent

# How long a worker that was told to end goes on. A worker whose neighbour died finds out by itself, at once if it is
# waiting for it, and says which stage is missing; this leaves it the time.
GRACE_S = 5.0


class WorkerError(RuntimeError):
    """A worker failed, and the others were ended."""


class Terminated(SystemExit):
    """This process was asked to end (SIGTERM and the like), and the workers have; the code is what shells say of it."""

    code: int


class Network(Protocol):
    """A network of our own, with a place for every worker."""

    def enter(self, worker: int) -> None:
        """Move this process to the place of a worker."""


def run_workers(
    function: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    network: Network | None = None,
    backend: str | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on every worker, inside a process group; return the results of the workers here.

    Under torchrun this process is one of the workers already and joins. Otherwise ``workers`` local ones are started
    with torch's elastic launcher, and ``function`` must be importable: defined at the top level of a module. In a
    ``network`` each starts in its own place and counts as a machine. ``backend``: as ``joined``. Ctrl-C reaches all
    of them, and is a KeyboardInterrupt here once they have ended; SIGTERM is ``Terminated``.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        size = int(os.environ["WORLD_SIZE"])
        if workers not in (None, size):
            raise ValueError(f"torchrun started {size} workers, but {workers} were asked for; leave one of them out")
        if network is not None:
            raise ValueError("workers that torchrun started are in their networks already; leave the links as they are")
        with joined(backend):
            return [function(*args)]
    if workers is None or workers < 1:
        raise ValueError(f"how many workers? got {workers}; ask for 1 or more, or start this under torchrun")
    for name in (
        "distributed.elastic.agent.server.api",
        "distributed.elastic.multiprocessing.api",
        "multiprocessing.spawn",
    ):
        logging.getLogger(f"torch.{name}").addFilter(_is_news)
    with tempfile.TemporaryDirectory(prefix="thinpipe-") as log_dir:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id="thinpipe",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="spawn",
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        )
        try:
            meeting = None if network is None else str(Path(log_dir) / "meeting")
            results = elastic_launch(config, _work)(function, args, network, meeting, backend)
        except ChildFailedError as error:
            raise WorkerError(_causes(error, Path(log_dir))) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None  # which it was before torch's launcher got hold of it
            raise Terminated(128 + error.sigval) from None
    return [results[worker] for worker in range(workers)]


@contextmanager
def joined(backend: str | None = None, meeting: str | None = None) -> Iterator[None]:
    """The process group that the environment describes (``RANK``, ``WORLD_SIZE`` ... as torchrun sets them).

    Args:
        backend: by default NCCL where every worker of this machine has a GPU of its own, gloo otherwise.
        meeting: a file in which the workers of one machine find each other, instead of over a network.
    """
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    own_gpu = torch.cuda.device_count() >= local_size
    if own_gpu:
        torch.cuda.set_device(local_rank)
    if "OMP_NUM_THREADS" not in os.environ:  # every worker taking every core is slower than each taking its share
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = None if meeting is None else dist.FileStore(meeting, size)
    dist.init_process_group(backend or ("nccl" if own_gpu else "gloo"), store=store, rank=rank, world_size=size)
    yield
    dist.destroy_process_group()  # not after an error: the others would see this worker leave before it says why


def _is_news(entry: logging.LogRecord) -> bool:
    """Whether torch's launcher says more than ``WorkerError`` will: the traceback of a worker that failed by itself.

    It also reports every worker that it ends, and as a traceback of its own that one was killed.
    """
    if entry.levelno < logging.ERROR:
        return False
    error = entry.exc_info[1] if entry.exc_info else None
    return not isinstance(error, ProcessExitedException) and LinkError.__name__ not in str(error)


@record
def _work(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    network: Network | None,
    meeting: str | None,
    backend: str | None,
) -> Any:
    if network is not None:
        network.enter(int(os.environ["RANK"]))  # first: threads and sockets stay where they were made
        os.environ["GROUP_RANK"] = os.environ["RANK"]  # which machine this is
        backend = backend or "gloo"  # NCCL would pass by the network, through the memory of the machine
    _end_late()
    end_with_parent()
    with joined(backend, meeting):
        return function(*args)


def _end_late() -> None:
    """On SIGTERM go on for GRACE_S, then exit, even from inside a call that never returns to Python."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(read, 1) != bytes([signal.SIGTERM]):
            pass
        time.sleep(GRACE_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="thinpipe-end-late", daemon=True).start()


def _causes(error: ChildFailedError, log_dir: Path) -> str:
    """One line per worker that failed: the signal that killed it, or the error it raised; causes before effects.

    torch names the one it saw first, which may be the neighbour of the one that failed; each leaves a file.
    """
    lines = {
        worker: f"killed by signal {-failure.exitcode} ({failure.signal_name()})"
        for worker, failure in error.failures.items()
        if failure.exitcode < 0
    }
    for path in log_dir.glob("**/error.json"):
        lines.setdefault(int(path.parent.name), json.loads(path.read_text())["message"]["message"])
    ordered = sorted(lines.items(), key=lambda item: (LinkError.__name__ in item[1], item))
    return "a worker failed and the others were ended:\n" + "\n".join(
        f"  worker {worker}: {line}" for worker, line in ordered
    )
