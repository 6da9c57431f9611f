"""Runs that nothing disturbs: where each setting ends, and checkpoints of it to damage."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from tests.faults.runs import ROOT, How, Setting, checkpoint_steps
from tests.faults.served import new_run

LIMIT_S = 240
_TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60
KEPT = (4, 5, 6)  # checkpoints of these steps, with a quarter of the run still to go


class Undisturbed:
    """One run for each setting that is asked for, kept in a folder for as long as thinpipe and torch are the same."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / _source_digest()
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def sha256(self, setting: Setting) -> str:
        """Return the hash of the parameters at the end."""
        return final_sha256(self._folder(setting) / "end")

    def checkpoints(self, setting: Setting, target: Path) -> None:
        """Copy a folder of checkpoints as a run leaves it that was ended after the last of KEPT."""
        shutil.copytree(self._folder(setting) / "saved", target, symlinks=True)  # DIR/best may lead nowhere

    def files(self) -> Path:
        """Return a folder with a small language model and texts."""

        def make(folder: Path) -> None:
            from tests.train.tasks.written import write_language_model

            folder.mkdir()
            write_language_model(folder / "llama", _TEXT)
            (folder / "texts.txt").write_text(_TEXT)

        return self._made("files", make)

    def cache(self, setting: Setting, server: int, target: Path) -> None:
        """Copy the cache of a server after a run."""
        shutil.copytree(self._folder(setting, "serve") / f"cache-{server}", target)

    def _folder(self, setting: Setting, how: How = "launcher") -> Path:
        return self._made(f"{setting}, {how}".replace(" ", "-"), lambda folder: _carry_out(folder, setting, how))

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return the folder of a name, made by the first who asks for it."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        folder = self.home / name
        with lock:
            if not folder.exists():
                self.home.mkdir(parents=True, exist_ok=True)
                # Not below the home: sockets are made in it, whose names must not be long.
                with tempfile.TemporaryDirectory(prefix="faults-") as made:
                    make(Path(made) / "run")
                    shutil.move(Path(made) / "run", folder)
        return folder


def _carry_out(folder: Path, setting: Setting, how: How) -> None:
    run = new_run(folder, setting, how, forked=True)
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
