"""The fingerprint of a data set: what it sees, and that it does not see where the data are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tasks.written import write_picture
from tests.train.toy import ToyTask, settings_for, world_in
from thinpipe.train.data import difference, fingerprint, read_data
from thinpipe.train.tasks.splits import Texts, at_most
from thinpipe.train.tasks.task import Batch, Data, Source
from thinpipe.train.tasks.tasks import task


def pictures(root: Path) -> Path:
    for kind, name in enumerate(("cats", "dogs")):
        (root / name).mkdir(parents=True)
        for number in range(10):
            write_picture(root / name / f"{number}.png", seed=10 * kind + number)
    return root


def of_pictures(root: Path) -> dict:
    return fingerprint(task("images").load(Source(data=root, image_size=32, pretrained=False))[0])


def of_texts(path: Path) -> dict:
    return fingerprint(task("texts").load(Source(data=path))[0])


def test_pictures_that_moved_are_the_same(tmp_path: Path) -> None:
    here = of_pictures(pictures(tmp_path / "here"))
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "deep")
    assert difference(here, of_pictures(tmp_path / "there" / "deep")) is None


@pytest.mark.parametrize("change", ["removed", "replaced", "renamed", "of the other class"])
def test_pictures_that_changed_are_others(tmp_path: Path, change: str) -> None:
    root = pictures(tmp_path)
    before = of_pictures(root)
    one = root / "cats" / "3.png"
    if change == "removed":
        one.unlink()
    elif change == "replaced":
        write_picture(one, seed=77, size=(50, 60))
    else:
        one.rename(root / ("cats/33.png" if change == "renamed" else "dogs/33.png"))
    words = difference(before, of_pictures(root))
    assert words is not None
    assert ("16 training samples when it was saved, 15 now" in words) == (change == "removed")


class Loads(ToyTask):
    """A task whose data are not what a task's should be."""

    def __init__(self, change: Callable[[Data], Any]) -> None:
        super().__init__()
        self.change = change

    def load(self, source: Source) -> Any:
        data, shape = super().load(source)
        changed = self.change(data)
        return changed if isinstance(changed, tuple) else (changed, shape)


def with_validation(**changes: Any) -> Callable[[Data], Data]:
    def change(data: Data) -> Data:
        for name, value in changes.items():
            setattr(data.validation, name, value)
        return data

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: (data,), r"load should return \(Data, Shape\); it returned a tuple"),
        (with_validation(labels=torch.zeros(0, dtype=torch.int64)), "no samples to validate with"),
        (with_validation(labels=torch.zeros(23)), r"labels should be int64 .*; got torch.float32 \[1\] for one"),
        (with_validation(batch=lambda indices: Batch(inputs=(indices,), labels=0)), "labels .*; got a int for one"),
        (
            with_validation(batch=lambda indices: Batch(inputs=torch.zeros(1, 3), labels=indices)),
            r"inputs should be a tuple of tensors, samples first; got no tuple: \[1, 3\]",
        ),
        (
            with_validation(batch=lambda indices: Batch(inputs=(torch.zeros(3), "a"), labels=indices)),
            r"got a tuple of \[3\], str",
        ),
    ],
)
def test_a_task_that_loads_wrong_types_is_an_error_with_the_right_ones(change: Any, message: str) -> None:
    made = Loads(change)
    with pytest.raises(ValueError, match=f"^task toy: .*{message}"):
        read_data(made, settings_for(made, None, parallel="none"), world_in(None))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a fine day,0", None),
        ("a fine nite,0", "the texts of the training samples differ"),
        ("a fine day,1", "the labels of the training samples differ"),
    ],
)
def test_a_changed_row_is_seen(tmp_path: Path, row: str, words: str | None) -> None:
    path, moved = tmp_path / "a.csv", tmp_path / "b.csv"
    rows = ["text,label", *(f"text {number},{number % 2}" for number in range(40))]
    path.write_text("\n".join([*rows[:9], "a fine day,0", *rows[9:]]))
    moved.write_text("\n".join([*rows[:9], row, *rows[9:]]))
    assert difference(of_texts(path), of_texts(moved)) == words


def test_small_differences_in_decoding_are_tolerated_and_larger_ones_are_not() -> None:
    saved = {"training": {"samples": 2, "values": [0.5, float("nan")]}}
    assert difference(saved, {"training": {"samples": 2, "values": [0.501, float("nan")]}}) is None
    assert difference(saved, {"training": {"samples": 2, "values": [0.7, float("nan")]}}) is not None
    assert difference(saved, {"training": {"samples": 2, "values": [0.5, 0.1]}}) is not None


def test_a_part_of_a_split_and_an_empty_one() -> None:
    ids = torch.arange(40).view(10, 4)
    split = Texts(ids=ids, mask=torch.ones_like(ids), labels=torch.arange(10) % 3)
    none = Texts(ids=ids[:0], mask=ids[:0], labels=torch.empty(0, dtype=torch.int64))
    whole = fingerprint(Data(train=split, validation=none, classes=3))
    part = fingerprint(Data(train=at_most(split, 4), validation=none, classes=3))
    assert whole["validation"] == {"samples": 0}
    assert difference(whole, part) == "10 training samples when it was saved, 4 now"
    assert part["training"].keys() == whole["training"].keys()
