"""The cache of a server: bounded, locked, confined to its folder."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from thinpipe.train.serve import model_cache
from thinpipe.train.serve.file_manifest import FolderFiles
from thinpipe.train.serve.model_cache import BLOCK, CachedFolder, ModelCache

MIB = 1 << 20
FILES = FolderFiles(files={"config.json": "{}"}, tensors={"a": [[10 * MIB], "int8"], "b": [[3, 5], "float32"]})


def other(number: int) -> FolderFiles:
    return replace(FILES, identity={"weights": f"{number:016x}"})


def fill(cached: CachedFolder, size: int) -> None:
    cached.cache.reserve(size, "the model")
    for number in range(-(-size // BLOCK)):
        cached.write("a", number, memoryview(os.urandom(min(BLOCK, 10 * MIB - number * BLOCK))))
    cached.save()


def test_files_are_sparse(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "new" / "cache", 1 << 30)
    cached = cache.open(FILES, 1)
    assert (cache.folder.stat().st_mode & 0o777, cached.folder.stat().st_mode & 0o777) == (0o700, 0o700)
    assert (cached.folder / "model.safetensors").stat().st_size > 10 * MIB
    assert cache.used_bytes() < MIB
    fill(cached, BLOCK)
    assert BLOCK <= cache.used_bytes() < BLOCK + MIB
    cached.close()


def test_the_limit_removes_what_was_not_used_for_longest(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, 25 * MIB)
    names = []
    for number in range(2):
        cached = cache.open(other(number), 1)
        fill(cached, 10 * MIB)
        cached.close()
        os.utime(cached.folder / "lock", (time.time() - 100 + number,) * 2)
        names.append(cached.folder.name)
    cache.open(other(0), 1).close()  # used again
    in_use = cache.open(other(2), 1)
    fill(in_use, 10 * MIB)
    assert {path.name for path in tmp_path.iterdir()} == {names[0], in_use.folder.name}
    assert cache.used_bytes() <= 25 * MIB
    with pytest.raises(
        ValueError, match=r"the model needs 20\.97 MB, and the folder of model files may have 26\.21 MB"
    ):
        cache.reserve(20 * MIB, "the model")
    assert {path.name for path in tmp_path.iterdir()} == {in_use.folder.name}
    with pytest.raises(ValueError, match="raise its limit on the server"):
        cache.reserve(26 * MIB, "the model")
    in_use.close()


def test_a_disk_that_has_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ModelCache(tmp_path, 1 << 60)
    with pytest.raises(ValueError, match="free some space on the server"):
        cache.reserve(1 << 50, "the model")


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, 1 << 30)
    first = cache.open(FILES, 1)
    second, third = cache.open(FILES, 1), ModelCache(tmp_path, 1 << 30).open(FILES, 2)
    assert [each.folder.name[-2:] for each in (first, second, third)] == ["-1", "-0", "-2"]
    with pytest.raises(ValueError, match="may have 1 B"):
        ModelCache(tmp_path, 1).reserve(1, "the model")  # what is in use stays
    assert all(each.folder.is_dir() for each in (first, second, third))
    first.close()
    again = cache.open(FILES, 1)
    assert again.folder == first.folder
    for each in (again, second, third):
        each.close()


def test_links_in_the_cache_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("text of the owner")
    cache = ModelCache(tmp_path / "cache", 1 << 30)
    cached = cache.open(FILES, 1)
    cached.close()
    for name in ("model.safetensors", "lock"):
        (cached.folder / name).unlink()
        (cached.folder / name).symlink_to(victim)
        with pytest.raises(ValueError, match="model files are kept in") as error:
            cache.open(FILES, 1)
        assert "\n" not in str(error.value)
        (cached.folder / name).unlink()
    (cached.folder / "config.json").unlink()
    (cached.folder / "config.json").symlink_to(victim)
    cache.open(FILES, 1).close()
    assert victim.read_text() == "text of the owner"


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", '{"a": 5}', '{"a": "2"}', '{"a": "1"}', '{"c": "1"}', '{"a": "11x"}']
)
def test_a_damaged_list_is_an_empty_one(tmp_path: Path, damage: str) -> None:
    cache = ModelCache(tmp_path, 1 << 30)
    cached = cache.open(FILES, 1)
    fill(cached, BLOCK)
    cached.close()
    (cached.folder / model_cache._BLOCKS).write_text(damage)
    again = cache.open(FILES, 1)
    assert not any(again.present["a"])
    again.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Not a directory; name a folder that can be written"):
        ModelCache(tmp_path / "file" / "cache", 1)
