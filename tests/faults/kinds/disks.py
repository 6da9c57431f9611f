"""Disks that fill up under way: for checkpoints, curves, records, captures or traces; for a while, or for good."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import time
from pathlib import Path

from tests.faults.expected import Expected
from tests.faults.fault import Fault, Impossible
from tests.faults.moments import AT_ONCE, Moment, draw_moment
from tests.faults.runs import Run, Setting

_OUTPUTS = {"--json": "record.json", "--log": "curves", "--capture": "tensors.safetensors", "--trace": "step.json"}
_TOLD = r"(?i)no space|disk|file too large|cannot be written|could not"


def draw_disk(random: random.Random, setting: Setting) -> Fault:
    option = random.choice(("--save", "--save", *_OUTPUTS))
    if option == "--save" and random.random() < 0.3:
        return _small_files(random.choice((100_000, 500_000)))
    if os.geteuid():
        raise Impossible("a small disk to fill is mounted, which needs root")
    if option == "--save":
        return _full_for_checkpoints(random)
    return _full_for(option, draw_moment(random, phases=("step",)))


def _small_files(limit: int) -> Fault:
    """No file may grow beyond a limit: what quotas do, and known before the first step."""

    def start(run: Run) -> None:
        run.start(
            *("--save", str(run.saved), "--save-every", "1"),
            limits=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )

    return Fault(
        words=f"no file may be larger than {limit // 1000} kB",
        strike=lambda run: None,
        moment=AT_ONCE,
        expected=Expected("may", frozenset({1, 2}), cause=_TOLD, told=_TOLD),
        start=start,
    )


def _full_for_checkpoints(random: random.Random) -> Fault:
    moment = draw_moment(random, phases=("step", "save"))
    full_s = random.choice((0.3, 1.0, None))  # None: for good

    def start(run: Run) -> None:
        _mount(run.saved)
        run.start("--save", str(run.saved), "--save-every", "1")

    def strike(run: Run) -> None:
        _fill(run.saved)
        if full_s is not None:
            time.sleep(full_s)
            _empty(run.saved)

    def undo(run: Run) -> None:
        _unmount(run.saved)

    # A checkpoint that cannot be written ends nothing. The last one is the result: without it the run has failed.
    return Fault(
        words=f"the disk of --save is full {'for good' if full_s is None else f'for {full_s} s'}, {moment}",
        strike=strike,
        moment=moment,
        expected=Expected("may", frozenset({1}), cause=_TOLD, told=_TOLD if full_s is None else ""),
        start=start,
        before_recovery=lambda run: _empty(run.saved),
        undo=undo,
    )


def _full_for(option: str, moment: Moment) -> Fault:
    """Checkpoints are on another disk; the run must reach its end, whether or not the output can be had."""

    def start(run: Run) -> None:
        disk = run.folder / "disk"
        _mount(disk)
        run.start("--save", str(run.saved), "--save-every", "1", option, str(disk / _OUTPUTS[option]))

    return Fault(
        words=f"the disk of {option} is full, {moment}",
        strike=lambda run: _fill(run.folder / "disk"),
        moment=moment,
        expected=Expected("may", frozenset({1}), cause=_TOLD, completes=True),
        start=start,
        undo=lambda run: _unmount(run.folder / "disk"),
    )


def _mount(folder: Path) -> None:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "faults", str(folder)], check=True)


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def _fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def _empty(folder: Path) -> None:
    (folder / "ballast").unlink(missing_ok=True)
