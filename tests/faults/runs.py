"""Small real runs of `thinpipe train`: on one machine, or as several, each machine a session of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.preloaded import Program
from tests.processes import Process, processes_of

ROOT = Path(__file__).parents[2]
EPOCHS, STEPS_PER_EPOCH = 4, 2
STEPS = EPOCHS * STEPS_PER_EPOCH
PATIENCE_S = 15  # of every run: what is silent for longer counts as lost
CODECS = ("none", "8bit", "sort:8", "axes:2+now", "topk:0.1", "power:4")

How = Literal["launcher", "machines", "torchrun", "serve", "listen"]  # the last two: served.py


@dataclass(frozen=True)
class Setting:
    """The settings that determine the end of a run: one undisturbed run is the reference for all with the same."""

    workers: int
    codec: str
    epochs: int = EPOCHS
    files: Path | None = None  # a folder with a model and texts: a language model, not the digits

    @property
    def steps(self) -> int:
        return self.epochs * STEPS_PER_EPOCH

    def options(self) -> list[str]:
        # A basis is learned of activations only.
        learned = ["--compress-forward", self.codec, "--compress-backward", "4bit"]
        codec = learned if self.codec.startswith("axes") else ["--compress", self.codec]
        task = ["--samples", "64", "--batch-size", "32", "--image-size", "16"]
        if self.files is not None:
            task = ["--model", str(self.files / "llama"), "--data", str(self.files / "texts.txt"), "--lora", "2"]
            task += ["--samples", "16", "--batch-size", "8", "--tokens", "32"]
        return [*task, "--chunks", "2", "--threads", "1", "--epochs", str(self.epochs), *codec]

    def __str__(self) -> str:
        longer = "" if self.epochs == EPOCHS else f", {self.epochs} epochs"
        return f"{self.workers} workers, {self.codec}{longer}{', language model' if self.files else ''}"


@dataclass(frozen=True)
class Machine:
    """One command: the launcher of all workers, or one of several machines."""

    process: subprocess.Popen[Any]
    out: Path
    err: Path
    strays: str | None = None  # in the commands of processes that agents of torchrun start in sessions of their own
    is_server: bool = False  # of `thinpipe serve`, which logs its runs

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def code(self) -> int:
        """As a shell says it: 128 more than the signal that killed it."""
        assert self.process.returncode is not None
        return self.process.returncode if self.process.returncode >= 0 else 128 - self.process.returncode

    @property
    def was_killed(self) -> bool:
        """Return True if a signal ended it before it installed its handlers."""
        return self.process.returncode is not None and self.process.returncode < 0

    def processes(self) -> list[Process]:
        return processes_of(self.pid, self.strays)

    def workers(self) -> list[Process]:
        """The workers that a launcher or an agent of torchrun started, by number: in the order of their start."""
        agents = [each for each in self.processes() if each.parent == self.pid and "-m thinpipe" in each.command]
        return agents or [each for each in self.processes() if each.parent == self.forking_server()]

    def forking_server(self) -> int | None:
        """The process that a launcher's workers are forked from."""
        names = ("multiprocessing.forkserver", "tests.preloaded")
        mine = (each for each in self.processes() if each.parent == self.pid)
        return next((each.pid for each in mine if any(name in each.command for name in names)), None)

    def stdout(self) -> str:
        return self.out.read_text(errors="replace")

    def stderr(self) -> str:
        return self.err.read_text(errors="replace")


class Run:
    """A run of one setting in a folder: checkpoints in `saved`, temporary files in `tmp`."""

    def __init__(self, folder: Path, setting: Setting, how: How = "launcher", *, forked: bool = False) -> None:
        self.folder, self.setting, self.how, self.forked = folder, setting, how, forked
        self.saved, self.tmp = folder / "saved", folder / "tmp"
        self.machines: list[Machine] = []
        self.dismissed: set[int] = set()  # servers that were ended because no run came
        self.port = _free_port() if how != "launcher" else 0
        self.tmp.mkdir(parents=True, exist_ok=True)

    def start(
        self, *options: str, env: Mapping[str, str] | None = None, limits: Callable[[], None] | None = None
    ) -> None:
        """Start a new run with more options: all of it, or every machine of it."""
        for rank in range(self.setting.workers if self.how != "launcher" else 1):
            self.start_machine(rank, *options, env=env, limits=limits)

    def start_machine(
        self,
        rank: int,
        *options: str,
        env: Mapping[str, str] | None = None,
        limits: Callable[[], None] | None = None,
    ) -> Machine:
        return self.command(*self._joining(rank), *self.setting.options(), *options, env=env, limits=limits)

    def command(
        self, *arguments: str, env: Mapping[str, str] | None = None, limits: Callable[[], None] | None = None
    ) -> Machine:
        """`python ARGUMENTS` as a machine of this run, in a session of its own, its words kept in files.

        ``forked``: by what has imported everything, so nothing can be done to it while it starts.
        """
        number = len(list(self.folder.glob("out-*.txt")))
        out, err = self.folder / f"out-{number}.txt", self.folder / f"err-{number}.txt"
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        ours = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.tmp), "OMP_NUM_THREADS": "1"}
        with out.open("wb") as out_file, err.open("wb") as err_file:
            files = {"stdin": subprocess.DEVNULL, "stdout": out_file, "stderr": err_file}
            env = inherited | ours | dict(env or {})
            process = (
                Program(*arguments, env=env, **files)
                if self.forked and limits is None  # which are set in between
                else subprocess.Popen(
                    [sys.executable, *arguments], start_new_session=True, env=env, preexec_fn=limits, **files
                )
            )
        strays = str(self.folder) if self.how == "torchrun" else None
        self.machines.append(Machine(process, out, err, strays, "serve" in arguments))
        return self.machines[-1]

    def resume(self, *options: str) -> Machine:
        """Start the run again, at its newest checkpoint if there is one."""
        there = ["--resume", str(self.saved)]
        anew = ["--workers", str(self.setting.workers), *self.setting.options(), "--save", str(self.saved)]
        return self.command("-m", "thinpipe", "train", *(there if self.steps() else anew), *options)

    def again(self) -> Run:
        """Return the same run, to be resumed: it starts commands as they are typed when nothing is wrong."""
        return Run(self.folder, self.setting, forked=True)

    def _joining(self, rank: int) -> list[str]:
        train = ["-m", "thinpipe", "train", "--patience", str(PATIENCE_S)]
        count = str(self.setting.workers)
        if self.how == "launcher":
            return [*train, "--workers", count]
        if self.how == "machines":
            return [*train, "--workers", count, "--rank", str(rank), "--master", f"127.0.0.1:{self.port}"]
        agent = ["-m", "torch.distributed.run", "--nnodes", count, "--nproc-per-node", "1", "--node-rank", str(rank)]
        return [*agent, "--master-addr", "127.0.0.1", "--master-port", str(self.port), *train]

    def worker(self, number: int) -> int | None:
        """The process of a worker, once there is one."""
        if self.how == "machines":
            return self.machines[number].pid if number < len(self.machines) else None
        home, place = (self.machines[0], number) if self.how == "launcher" else (self.machines[number], 0)
        workers = home.workers()
        return workers[place].pid if len(workers) > place else None

    @property
    def is_over(self) -> bool:
        return all(machine.is_over for machine in self.machines)

    def wait(self, limit_s: float) -> bool:
        """Return True if every machine ends within a time."""
        until = time.monotonic() + limit_s
        while not self.is_over and time.monotonic() < until:
            time.sleep(0.05)
        return self.is_over

    def left(self, limit_s: float) -> list[Process]:
        """Processes that are still there a while after the commands that started them ended."""
        until = time.monotonic() + limit_s
        while (found := self._processes()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def end(self) -> None:
        """Whatever is left of this run, ended: by its own sessions only."""
        for process in self._processes():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for machine in self.machines:
            machine.process.wait()

    def _processes(self) -> list[Process]:
        return [process for machine in self.machines for process in machine.processes()]

    def steps(self) -> list[int]:
        """Return the steps with complete checkpoints."""
        return checkpoint_steps(self.saved)


def checkpoint_steps(saved: Path) -> list[int]:
    """The steps of the complete checkpoints of a folder, oldest first."""
    names = [path.name for path in saved.glob("step-*")]
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name)))


def namespaces_of(pids: Sequence[int]) -> list[str]:
    """Network namespaces that these processes made and that are still there."""
    found = (path.name for path in Path("/var/run/netns").glob("thinpipe-*"))
    return [name for name in found if int(name.split("-")[1]) in pids]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
