"""Saving: one run to a folder, one folder for all workers or the client's alone, disks that are full for a while."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.train.toy import Recorder, ToyTask, run_toy, settings_for, train_toy, world_in
from thinpipe.train.checkpoints import saving
from thinpipe.train.checkpoints.folder import LOCK, FolderLock, checkpoints, newest
from thinpipe.train.checkpoints.manifest import Progress, SaveOptions, read_manifest
from thinpipe.train.checkpoints.part import Part, verify_part
from thinpipe.train.checkpoints.resume import adopt_client_settings
from thinpipe.train.checkpoints.saving import UnsavedError
from thinpipe.train.engines.world import SetupError
from thinpipe.train.running import RunOptions
from thinpipe.train.worker import train

HOLDER = """
import sys, time
from pathlib import Path
from thinpipe.train.checkpoints.folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_in_a_folder_is_rejected_with_the_holder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(SetupError, match=f"{tmp_path} is in use by process {os.getpid()} on ") as error:
        run_toy(None, ToyTask(), RunOptions(save=tmp_path), parallel="none")
    assert len(str(error.value).splitlines()) == 1
    lock.release()
    run_toy(None, ToyTask(), RunOptions(save=tmp_path), parallel="none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-00000004", "step-00000008"]


def test_a_killed_run_holds_no_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"by process {holder.pid} on "):
            FolderLock(tmp_path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (tmp_path / LOCK).exists()
    lock = FolderLock(tmp_path)
    assert lock.is_held
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_has_just_been_taken_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, its holder ends and removes it: nobody else would see that lock."""
    first, flock, opened = FolderLock(tmp_path), fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not opened:
            opened.append(handle)
            first.release()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = FolderLock(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is in use"):
        FolderLock(tmp_path)
    lock.release()


def test_a_file_system_without_locks_is_reported_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "step-00000002.partial"  # perhaps another run's, just being written
    left.mkdir()

    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    recorder = run_toy(None, ToyTask(), RunOptions(save=tmp_path), parallel="none")
    assert recorder.notices == [
        f"{tmp_path} cannot be locked (No locks available): see to it that no other run saves there"
    ]
    assert len(checkpoints(tmp_path)) == 2
    assert left.exists()


def test_two_new_runs_do_not_mix(tmp_path: Path) -> None:
    """The second was told to start before the first had saved anything."""
    run_toy(None, ToyTask(), RunOptions(save=tmp_path), parallel="none")
    with pytest.raises(SetupError, match="holds checkpoints of another run"):
        run_toy(None, ToyTask(), RunOptions(save=tmp_path), parallel="none")


def train_apart(group: Any, directory: Path, running: dict[str, Any], given: dict[str, Any]) -> Recorder | str:
    """As on machines that share nothing: every worker sees a folder of its own."""
    task, world, recorder = ToyTask("dropout"), world_in(group), Recorder()
    mine = directory / str(world.worker)
    goes_on = running.pop("goes_on", False)
    settings = settings_for(task, group, **given)
    how = RunOptions(save=mine, resume=mine if goes_on else None, **running)
    settings, how = adopt_client_settings(settings, how, world)
    try:
        train(task, settings, how, world, lambda: recorder)
    except SetupError as error:
        return str(error)
    return recorder


def test_folders_that_are_not_one_are_an_error_before_the_first_step(pool: Pool, tmp_path: Path) -> None:
    errors = pool.run(train_apart, 3, tmp_path, {}, {})
    assert len(set(errors)) == 1
    assert f"workers 1, 2 do not see what the client writes into {tmp_path / '0'}" in errors[0]
    assert "or give save_local, which" in errors[0]
    assert not any(tmp_path.rglob("*"))


@pytest.mark.parametrize("workers", [2, 3])
def test_saved_by_the_client_alone_a_run_resumes_bit_identically(pool: Pool, tmp_path: Path, workers: int) -> None:
    given = {"compress_forward": "axes:2+now", "compress_backward": "power:4"}
    whole = pool.run(train_toy, workers, "dropout", RunOptions(), given)[0]
    local = {"save_local": True, "steps": 5}
    pool.run(train_apart, workers, tmp_path, local, given)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    saved = newest(tmp_path / "0")
    manifest = read_manifest(saved)
    assert [part.name for part in manifest.parts] == [f"part-{worker}.safetensors" for worker in range(workers)]
    assert manifest.options.save_local
    for part in manifest.parts:
        verify_part(saved, part)
    rest = pool.run(train_apart, workers, tmp_path, {"save_local": True, "goes_on": True}, given)[0]
    assert rest.end.parameters_sha256 == whole.end.parameters_sha256
    assert rest.notices == []


def test_damaged_with_the_client_alone_all_step_back(pool: Pool, tmp_path: Path) -> None:
    local = {"save_local": True, "steps": 5, "save_every": 3, "keep_best": False}
    pool.run(train_apart, 2, tmp_path, local, {})
    os.truncate(newest(tmp_path / "0") / "part-1.safetensors", 100)
    recorder = pool.run(train_apart, 2, tmp_path, {"save_local": True, "goes_on": True}, {})[0]
    assert recorder.notices[0].startswith("step 5 is damaged: part-1.safetensors has 100 bytes")
    assert recorder.notices[0].endswith("going on from step 3")


def test_the_settings_of_a_run_that_the_client_has_are_the_clients(pool: Pool, tmp_path: Path) -> None:
    """A server that has no checkpoint knows no settings: it was started with --resume and nothing else."""
    pool.run(train_apart, 2, tmp_path, {"save_local": True, "steps": 5}, {"lr": 0.01})
    ends = pool.run(_train_as_requested, 2, tmp_path)
    assert ends[0].end.steps == 3


def _train_as_requested(group: Any, directory: Path) -> Recorder | str:
    given = {"lr": 0.01} if group.rank() == 0 else {}
    return train_apart(group, directory, {"save_local": True, "goes_on": True}, given)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full")


def train_on_full_disk(group: Any, directory: Path, worker: int, steps: list[int], local: bool) -> tuple[Recorder, str]:
    """One worker finds the disk full when these steps are saved."""
    write, recorder, task = saving.write_pieces, Recorder(), ToyTask()
    world = world_in(group)

    def write_or_not(path: Path, pieces: Any) -> Part:
        if world.worker == worker and int(path.parent.name[5:13]) in steps:
            path.write_bytes(b"some")
            raise FULL
        return write(path, pieces)

    saving.write_pieces = write_or_not
    try:
        running = RunOptions(save=directory, save_every=2, keep=2, save_local=local, keep_best=False)
        train(task, settings_for(task, group), running, world, lambda: recorder)
    except UnsavedError as error:
        return recorder, str(error)
    finally:
        saving.write_pieces = write
    return recorder, ""


@pytest.mark.parametrize(("worker", "local"), [(0, False), (1, False), (0, True)])
def test_a_full_disk_ends_no_run_and_the_next_save_is_another_try(
    pool: Pool, tmp_path: Path, worker: int, local: bool
) -> None:
    (recorder, error), *others = pool.run(train_on_full_disk, 2, tmp_path, worker, [4, 6], local)
    problem = f"worker {worker}: /full: No space left on device"
    assert recorder.problems == [(4, problem), (6, problem)]
    assert [Path(path).name for path in recorder.paths] == ["step-00000002", "step-00000008"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000008"]
    assert [error, *(message for _, message in others)] == ["", ""]
    assert recorder.end.steps == 8


def test_a_last_save_that_fails_is_an_error_after_the_end(pool: Pool, tmp_path: Path) -> None:
    (recorder, error), (_, other) = pool.run(train_on_full_disk, 2, tmp_path, 1, [8], False)
    assert recorder.end.steps == 8
    assert recorder.error is None
    assert error == other
    assert error.endswith("its last checkpoint could not be saved: worker 1: /full: No space left on device")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004", "step-00000006"]


def test_a_folder_that_has_gone_is_made_again(tmp_path: Path) -> None:
    """The save that finds it gone makes it, and the run goes on."""

    class Broom(Recorder):
        def saved(self, step: int, path: str) -> None:
            super().saved(step, path)
            if step == 2:
                shutil.rmtree(tmp_path / "run")

    recorder, task = Broom(), ToyTask()
    settings = settings_for(task, None, parallel="none")
    train(task, settings, RunOptions(save=tmp_path / "run", save_every=2), world_in(None), lambda: recorder)
    assert recorder.problems == []
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000006", "step-00000008"]


def test_a_part_larger_than_expected_is_not_taken(pool: Pool, tmp_path: Path) -> None:
    problems = pool.run(_save_too_much, 2, tmp_path)
    assert problems[0] == problems[1]
    assert re.fullmatch(r"worker 1 would send 4000\d\d\d bytes, and about 1000 were expected", problems[0])
    assert list(tmp_path.iterdir()) == []


def _save_too_much(group: Any, directory: Path) -> str | None:
    world = world_in(group)
    saver = saving.Saver(
        directory,
        world,
        settings=settings_for(ToyTask(), group),
        options=SaveOptions(save_local=True),
        first_units=(0, 1, 5),
        data={},
        expected_bytes=[1000, 1000],
        companions={},
    )
    limit, saving._SLACK = saving._SLACK, 1000
    try:
        return saver.save(Progress(step=1), {"model/x": torch.zeros(1_000_000 if world.worker else 10)}).problem
    finally:
        saving._SLACK = limit
