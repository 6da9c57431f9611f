"""Plans and trainings for tests of ablations: real settings, made-up trainings."""

from __future__ import annotations

import sys
from pathlib import Path

from thinpipe.cli.ablate import resolve
from thinpipe.lab.ablation.plan import Plan, read_plan

FAKE_TRAIN = (sys.executable, str(Path(__file__).with_name("fake_train.py")))


def write_plan(folder: Path, matrix: str, train: str = 'task = "digits"', title: str = "a plan") -> Path:
    path = folder / "plan.toml"
    path.write_text(f'title = "{title}"\n[train]\n{train}\n[matrix]\n{matrix}\n')
    return path


def make_plan(folder: Path, matrix: str, train: str = 'task = "digits"', *overrides: str) -> Plan:
    return read_plan(write_plan(folder, matrix, train), resolve, overrides)


def starts(log: Path) -> list[str]:
    """Return the log of the fake runs: codec and seed of each."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.partition(" threads")[0] for line in lines if " threads " in line]
