"""Checkpoints that are damaged on disk before a run is taken up again."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.faults.checks import first_step
from tests.faults.expected import Expected, Result
from tests.faults.fault import Fault
from tests.faults.moments import AT_ONCE
from tests.faults.runs import Run, Setting
from tests.faults.undisturbed import KEPT, Undisturbed

NEWEST, OLDER, OLDEST = KEPT[2], KEPT[1], KEPT[0]


def draw_rest(random: random.Random, setting: Setting, undisturbed: Undisturbed) -> Fault:
    damage, words = random.choice(_DAMAGES)
    both = random.random() < 0.2
    damaged = (NEWEST, OLDER) if both else (NEWEST,)
    state = random.getrandbits(32)

    def start(run: Run) -> None:
        undisturbed.checkpoints(setting, run.saved)
        drawn = type(random)(state)
        for step in damaged:
            damage(_folder(run.saved, step), drawn)
        run.resume()

    def also(run: Run, result: Result) -> None:
        machine = run.machines[0]
        first = first_step(machine)
        if first < (OLDEST if both else OLDER):
            result.blame("lost steps", f"goes on after step {first}, though an older checkpoint was whole")
        hidden = damage is _delete_manifest  # a folder without one is no checkpoint: there is nothing to tell
        if first < NEWEST and not hidden and "damaged" not in machine.stderr():
            result.blame("other", f"goes on after step {first} and does not say that a newer checkpoint is damaged")

    return Fault(
        words=f"{words} in the checkpoint{'s' if both else ''} of step {' and '.join(map(str, damaged))}",
        strike=lambda run: None,
        moment=AT_ONCE,
        expected=Expected("must"),
        start=start,
        also=also,
    )


def _folder(saved: Path, step: int) -> Path:
    return saved / f"step-{step:08d}"


def _parts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "manifest.json")


def _flip(path: Path, random: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _flip_part(folder: Path, random: random.Random) -> None:
    _flip(random.choice(_parts(folder)), random)


def _flip_manifest(folder: Path, random: random.Random) -> None:
    _flip(folder / "manifest.json", random)


def _cut(folder: Path, random: random.Random) -> None:
    path = random.choice([*_parts(folder), folder / "manifest.json"])
    path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


def _empty(folder: Path, random: random.Random) -> None:
    random.choice([*_parts(folder), folder / "manifest.json"]).write_bytes(b"")


def _delete_part(folder: Path, random: random.Random) -> None:
    random.choice(_parts(folder)).unlink()


def _delete_manifest(folder: Path, random: random.Random) -> None:
    (folder / "manifest.json").unlink()


def _older_part(folder: Path, random: random.Random) -> None:
    part = random.choice(_parts(folder))
    shutil.copy(_folder(folder.parent, OLDEST) / part.name, part)


_DAMAGES: tuple[tuple[Callable[[Path, random.Random], None], str], ...] = (
    (_flip_part, "a bit of a part flipped"),
    (_flip_manifest, "a bit of the manifest flipped"),
    (_cut, "a file cut"),
    (_empty, "a file emptied"),
    (_delete_part, "a part deleted"),
    (_delete_manifest, "the manifest deleted"),
    (_older_part, "a part of an older step"),
)
