"""The tokenizer that a run keeps in the folder of its checkpoints: there whenever the run is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from thinpipe.system.files import read_folder
from thinpipe.train.checkpoints.folder import COMPANIONS, FolderLock, keep_companions

OLD = {"tokenizer.json": b"old", "tokenizer_config.json": b"old too", "vocab.txt": b"a"}
NEW = {"tokenizer.json": b"new", "tokenizer_config.json": b"new too", "additional_chat_templates/tools.jinja": b"b"}


class Killed(BaseException):
    """In the place of SIGKILL: nothing catches it."""


@pytest.mark.parametrize("renames", range(4))
def test_a_run_killed_while_writing_a_tokenizer_leaves_complete_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    keep_companions(tmp_path, OLD)
    done: list[Any] = []

    def rename(*paths: Any, replace: Any = os.replace) -> None:
        if len(done) == renames:
            raise Killed
        done.append(paths)
        replace(*paths)

    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(os, "rename", rename)
    try:
        keep_companions(tmp_path, NEW)
    except Killed:
        assert renames < len(NEW)
    monkeypatch.undo()
    there = read_folder(tmp_path / COMPANIONS)
    for name in OLD.keys() & NEW.keys():
        assert there[name] in (OLD[name], NEW[name])
    keep_companions(tmp_path, NEW)
    assert read_folder(tmp_path / COMPANIONS) == NEW


def test_leftovers_next_to_a_tokenizer_are_removed(tmp_path: Path) -> None:
    keep_companions(tmp_path, OLD)
    (tmp_path / COMPANIONS / ".17.tmp.vocab.txt").write_text("half")
    keep_companions(tmp_path, OLD)
    assert read_folder(tmp_path / COMPANIONS) == OLD


def test_a_new_folder_of_a_run_is_on_disk_in_the_one_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("thinpipe.system.files.sync", synced.append)
    FolderLock(tmp_path / "runs" / "first").release()
    assert synced == [tmp_path / "runs", tmp_path]
