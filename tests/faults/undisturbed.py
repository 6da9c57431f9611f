"""Runs that nothing disturbs: where each setting ends, and checkpoints of it to damage."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
from pathlib import Path

import torch

from tests.faults.runs import ROOT, Run, Setting, checkpoint_steps

LIMIT_S = 240
KEPT = (4, 5, 6)  # checkpoints of these steps, with a quarter of the run still to go


class Undisturbed:
    """One run for each setting that is asked for, kept in a folder for as long as thinpipe and torch are the same."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / _source_digest()
        self._locks: dict[Setting, threading.Lock] = {}
        self._lock = threading.Lock()

    def sha256(self, setting: Setting) -> str:
        """Return the hash of the parameters at the end."""
        return final_sha256(self._folder(setting) / "end")

    def checkpoints(self, setting: Setting, target: Path) -> None:
        """Copy a folder of checkpoints as a run leaves it that was ended after the last of KEPT."""
        shutil.copytree(self._folder(setting) / "saved", target, symlinks=True)  # DIR/best may lead nowhere

    def _folder(self, setting: Setting) -> Path:
        with self._lock:
            lock = self._locks.setdefault(setting, threading.Lock())
        folder = self.home / str(setting).replace(" ", "-")
        with lock:
            if not folder.exists():
                self.home.mkdir(parents=True, exist_ok=True)
                # Not below the home: sockets are made in it, whose names must not be long.
                with tempfile.TemporaryDirectory(prefix="faults-") as made:
                    _carry_out(Path(made) / "run", setting)
                    shutil.move(Path(made) / "run", folder)
        return folder


def _carry_out(folder: Path, setting: Setting) -> None:
    run = Run(folder, setting, forked=True)
    run.start("--save", str(run.saved), "--save-every", "1", "--keep", "99")
    ended = run.wait(LIMIT_S)
    run.end()
    if not ended or run.machines[0].code:
        raise RuntimeError(f"an undisturbed run ({setting}) did not end well:\n{run.machines[0].stderr()}")
    last = checkpoint_steps(run.saved)[-1]
    (run.saved / f"step-{last:08d}").rename(folder / "last")
    (folder / "end").mkdir()
    (folder / "last").rename(folder / "end" / f"step-{last:08d}")
    for step in checkpoint_steps(run.saved):
        if step not in KEPT:
            shutil.rmtree(run.saved / f"step-{step:08d}")


def final_sha256(saved: Path) -> str:
    """The digest of the parameters in the newest checkpoint, which only that of a complete run has."""
    steps = checkpoint_steps(saved)
    if not steps:
        return ""
    manifest = json.loads((saved / f"step-{steps[-1]:08d}" / "manifest.json").read_text())
    return str(manifest["progress"]["parameters_sha256"])


def _source_digest() -> str:
    """Another thinpipe or torch may end elsewhere."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted((ROOT / "thinpipe").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
