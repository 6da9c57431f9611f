"""Validation data of one's own: all of it validates, all of the data trains, and what does not fit is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict

from tests.train.tasks.test_own_data import pictures, scratch
from tests.train.tasks.written import write_language_model
from thinpipe.options import OptionError, flags_in_errors
from thinpipe.train.data import difference, fingerprint
from thinpipe.train.tasks.corpus import read_texts
from thinpipe.train.tasks.task import Data, OfText, Source
from thinpipe.train.tasks.tasks import task

TEXT = "the client keeps the first and the last layers, the servers have those between. "


def read(name: str, source: Source) -> Data:
    """Look for the data and load them, as a run does."""
    task(name).preflight(source)
    return task(name).load(source)[0]


def refused(name: str, source: Source) -> str:
    """The error of a task for a source, as the command line shows it."""
    with pytest.raises(ValueError, match=" ") as error:
        read(name, source)
    with flags_in_errors():
        return str(error.value)


def table(path: Path, labels: str, column: str = "text") -> Path:
    path.write_text(f"{column},label\n" + "".join(f"text {number},{label}\n" for number, label in enumerate(labels)))
    return path


def test_texts(tmp_path: Path) -> None:
    source = Source(data=table(tmp_path / "train.csv", "bacab"), validation=table(tmp_path / "val.csv", "cba"))
    assert task("texts").preflight(source)
    data, shape = task("texts").load(source)
    assert (len(data.train), len(data.validation), shape.labels) == (5, 3, ("a", "b", "c"))
    assert data.validation.batch(torch.arange(3)).labels.tolist() == [2, 1, 0]  # by the labels of training


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\ntext,a\nmore,d\n", "val.csv, line 3: no row of .*train.csv, .* has the label 'd'; .* a, b, c"),
        (
            "sentence,label\ntext,a\n",
            "val.csv has its texts in sentence, and .*train.csv, .* in text; name the",
        ),
        ("text,kind\ntext,a\n", "val.csv has the columns text, kind; it should have label"),
        ("text,label\n", "val.csv should have a row or more; it has 0"),
        ("", "val.csv should have a row or more; it has 0"),
        (None, "task texts needs --validation FILE.csv or FILE.jsonl; .*val.csv is not there"),
    ],
)
def test_wrong_texts(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "val.csv").write_text(content)
    source = Source(data=table(tmp_path / "train.csv", "abcab"), validation=tmp_path / "val.csv")
    assert re.search(message, refused("texts", source))


def test_pictures(tmp_path: Path) -> None:
    root = pictures(tmp_path / "train", {"a": 3, "b": 4})
    pictures(tmp_path / "val", {"a": 2, "b": 1}, start=50)
    pictures(tmp_path / "own", {"a": 1, "b": 3}, start=70)
    own = tmp_path / "own"
    for data in (root, tmp_path):  # the second has a folder that would validate
        loaded, shape = task("images").load(replace(scratch(data), validation=own))
        assert (len(loaded.train), len(loaded.validation), shape.labels) == (7, 4, ("a", "b"))
        assert loaded.validation.batch(torch.arange(4)).labels.tolist() == [0, 1, 1, 1]


def test_wrong_pictures(tmp_path: Path) -> None:
    source = replace(scratch(pictures(tmp_path / "train", {"a": 3, "b": 4})), validation=tmp_path / "val")
    assert re.search(r"needs --validation DIR, .*val is no folder", refused("images", source))
    pictures(tmp_path / "val", {"a": 1, "c": 1, "d": 1})
    assert re.search(r"val has classes that there is nothing to train with: c, d", refused("images", source))


@pytest.fixture
def texts(tmp_path: Path) -> Source:
    write_language_model(tmp_path / "model", TEXT)
    (tmp_path / "train.txt").write_text(TEXT * 20)
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "a.txt").write_text(TEXT * 2)
    return Source(model=str(tmp_path / "model"), data=tmp_path / "train.txt", validation=tmp_path / "val", tokens=16)


def test_running_text(texts: Source) -> None:
    task("lm").preflight(texts)
    whole, _ = task("lm").load(texts)
    part, _ = task("lm").load(replace(texts, validation=None))
    assert isinstance(whole.train, OfText)
    assert isinstance(part.train, OfText)
    assert isinstance(whole.validation, OfText)
    assert whole.train.text_bytes == pytest.approx(20 * len(TEXT), abs=100)  # but for what fills no window
    assert part.train.text_bytes == pytest.approx(19 * len(TEXT), abs=100)
    assert whole.validation.text_bytes == pytest.approx(2 * len(TEXT), abs=100)
    assert difference(fingerprint(part), fingerprint(whole)) is not None


def test_wrong_running_text(texts: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts.validation is not None
    file = texts.validation / "a.txt"
    file.write_text("short")
    assert re.search(r"--validation .*val is too short: it has \d+ tokens, fewer than the 17", refused("lm", texts))
    file.write_bytes(b"a\0")
    assert "a.txt is not text" in refused("lm", texts)
    file.rename(file.with_suffix(".bin"))
    assert re.search(r"val has no texts: files that end in .txt", refused("lm", texts))
    large = replace(texts, validation=texts.data)
    monkeypatch.setattr("thinpipe.train.tasks.corpus.check_fits", refuse_validation)
    assert refused("lm", large) == f"--validation {texts.data}: its text and tokens"


def refuse_validation(what: str, size: int, remedy: str) -> None:
    if what.startswith("{validation}"):
        raise OptionError(what)


def test_data_sets(tmp_path: Path) -> None:
    one = DatasetDict({"train": Dataset.from_dict({"text": ["a", "b"]}), "test": Dataset.from_dict({"text": ["c"]})})
    one.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": Dataset.from_dict({"text": ["d", "e"]})}).save_to_disk(str(tmp_path / "two"))
    (tmp_path / "three.txt").write_text("f")
    assert read_texts(tmp_path / "one") == (["a", "b"], ["c"])
    assert read_texts(tmp_path / "one", tmp_path / "three.txt") == (["a", "b"], ["f"])
    assert read_texts(tmp_path / "three.txt", tmp_path / "one") == (["f"], ["c"])  # its own split for this
    assert read_texts(tmp_path / "three.txt", tmp_path / "two") == (["f"], ["d", "e"])
    DatasetDict({"train": Dataset.from_dict({"words": ["d"]})}).save_to_disk(str(tmp_path / "four"))
    with pytest.raises(ValueError, match=r"validation .*four: texts are in a column `text`; it has words"):
        read_texts(tmp_path / "three.txt", tmp_path / "four")


def write_chats(path: Path, answers: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": "the client ", "completion": each}) + "\n" for each in answers))
    return path


def test_conversations(texts: Source, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "train.jsonl", ["keeps the first layers"])  # one is enough
    validation = write_chats(tmp_path / "val.jsonl", ["keeps the last and the first", "keeps the labels"])
    source = replace(texts, data=data, validation=validation, tokens=64)
    task("chat").preflight(source)
    loaded, _ = task("chat").load(source)
    assert (len(loaded.train), len(loaded.validation)) == (1, 2)
    train, validates = (split.batch(torch.tensor([0])).inputs[0] for split in (loaded.train, loaded.validation))
    assert train.shape == validates.shape  # padded to the longest of both files
    assert loaded.notices[-1].startswith("3 examples of ")


def test_wrong_conversations(texts: Source, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "train.jsonl", ["keeps", "the last"])
    source = replace(texts, data=data, validation=tmp_path / "val.jsonl", tokens=16)
    assert re.search(r"task chat needs --validation FILE.jsonl; .*val.jsonl is not there", refused("chat", source))
    write_chats(tmp_path / "val.jsonl", [])
    assert "val.jsonl has no examples" in refused("chat", source)
    (tmp_path / "val.jsonl").write_text('{"prompt": "a"}\n')
    assert "val.jsonl, line 1: an example is" in refused("chat", source)
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": TEXT, "completion": "a"}) + "\n")
    message = r"--validation .*val.jsonl: one is needed; it has 1, 0 with an answer within --tokens 16"
    assert re.search(message, refused("chat", source))


@pytest.mark.parametrize("name", ["digits", "grammar", "cifar10", "rte"])
def test_other_tasks_have_their_own(name: str, tmp_path: Path) -> None:
    line = refused(name, Source(validation=tmp_path, pretrained=False))
    assert re.search(rf"task {name} takes .* and not --validation", line)


def test_other_validation_data_are_a_difference_that_resuming_names(tmp_path: Path) -> None:
    data = table(tmp_path / "train.csv", "abcab")
    found = [
        fingerprint(task("texts").load(Source(data=data, validation=table(tmp_path / f"{name}.csv", labels)))[0])
        for name, labels in (("one", "abc"), ("moved", "abc"), ("other", "abb"), ("more", "abca"))
    ]
    assert difference(found[0], found[1]) is None  # where it is does not matter
    assert difference(found[0], found[2]) == "the labels of the validation samples differ"
    assert difference(found[0], found[3]) == "3 validation samples when it was saved, 4 now"
