"""Your own pictures and texts: what is found, how it is split, and what is said about what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.train.tasks.written import write_picture, write_roberta
from thinpipe.train.models.sequential import units_of
from thinpipe.train.tasks.task import DataError, Source
from thinpipe.train.tasks.tasks import task


def pictures(root: Path, counts: dict[str, int], start: int = 0) -> Path:
    for name, count in counts.items():
        for index in range(count):
            write_picture(root / name / f"{index}.{'png' if index % 2 else 'jpg'}", seed=start + index)
    return root


def scratch(data: Path) -> Source:
    return Source(data=data, pretrained=False, width=0.1, image_size=32)


def test_every_fifth_picture_validates(tmp_path: Path) -> None:
    data, shape = task("images").load(scratch(pictures(tmp_path, {"cat": 7, "dog": 5})))
    assert (len(data.train), len(data.validation), shape.classes) == (9, 3, 2)
    assert data.validation.batch(torch.arange(3)).labels.tolist() == [0, 0, 1]  # files 0, 5 and 10
    batch = data.train.batch(torch.arange(9), augment_seed=1)
    assert batch.inputs[0].shape == (9, 3, 32, 32)
    assert batch.labels.sum() == 4
    model = task("images").build(shape, scratch(tmp_path))
    assert torch.nn.Sequential(*units_of(model))(batch.inputs[0]).shape == (9, 2)


@pytest.mark.parametrize("name", ["val", "validation"])
def test_folders_train_and_validation_are_the_split(tmp_path: Path, name: str) -> None:
    pictures(tmp_path / "train", {"a": 3, "b": 4, "c": 1})
    pictures(tmp_path / name, {"a": 2, "c": 1}, start=50)
    write_picture(tmp_path / name / "b" / "x.webp")
    data, shape = task("images").load(scratch(tmp_path))
    assert (len(data.train), len(data.validation), shape.classes) == (8, 4, 3)
    assert data.validation.batch(torch.arange(4)).labels.tolist() == [0, 0, 1, 2]


def test_wrong_pictures_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none was given"):
        task("images").load(Source())
    with pytest.raises(ValueError, match="is no folder"):
        task("images").load(scratch(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="two classes or more; it has no folder"):
        task("images").load(scratch(tmp_path))
    pictures(tmp_path, {"cat": 3})
    with pytest.raises(ValueError, match="two classes or more; it has cat"):
        task("images").load(scratch(tmp_path))
    (tmp_path / "dog").mkdir()
    with pytest.raises(ValueError, match=r"no pictures in .*dog; known are .bmp"):
        task("images").load(scratch(tmp_path))
    (tmp_path / "dog" / "notes.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"notes\.png cannot be read as a picture"):
        task("images").load(scratch(tmp_path))


@pytest.mark.parametrize("ending", ["bmp", "gif", "jpg", "png", "tif", "webp"])
def test_a_picture_that_breaks_off_is_named_before_training(tmp_path: Path, ending: str) -> None:
    pictures(tmp_path, {"cat": 2, "dog": 2})
    cut = write_picture(tmp_path / "cat" / f"2.{ending}", size=(200, 150))
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size * 4 // 5])
    with pytest.raises(ValueError, match=rf"2\.{ending} cannot be read as a picture: .*; replace or remove it"):
        task("images").load(scratch(tmp_path))


def test_a_picture_that_is_damaged_inside_is_a_data_error_when_it_is_read(tmp_path: Path) -> None:
    pictures(tmp_path, {"cat": 2, "dog": 2})
    damaged = tmp_path / "cat" / "1.png"
    content = bytearray(damaged.read_bytes())
    content[200:400] = bytes(200)
    damaged.write_bytes(content)
    data, _ = task("images").load(scratch(tmp_path))
    with pytest.raises(DataError, match=r"1\.png cannot be read as a picture: .*; replace or remove it"):
        data.train.batch(torch.arange(len(data.train)))


def write_csv(path: Path, header: str, rows: int, line: str = "good {0},bad {0},{1}") -> Path:
    path.write_text("\n".join([header, *(line.format(index, "yn"[index % 2]) for index in range(rows))]))
    return path


def test_texts_of_a_csv_with_words_as_labels(tmp_path: Path) -> None:
    source = Source(data=write_csv(tmp_path / "t.csv", "text1,text2,label", 20), tokens=12)
    data, shape = task("texts").load(source)
    assert (len(data.train), len(data.validation), shape.classes) == (16, 4, 2)
    batch = data.validation.batch(torch.arange(4))
    assert batch.labels.tolist() == [1, 0, 1, 0]  # rows 0, 5, 10, 15; n before y
    assert batch.inputs[0].shape == (4, 12)
    values = batch.inputs
    for unit in units_of(task("texts").build(shape, source)):
        output = unit(*values)
        values = output if isinstance(output, tuple) else (output,)
    assert values[0].shape == (4, 2)


def test_texts_of_jsonl_with_numbers_as_labels_and_a_checkpoints_tokenizer(tmp_path: Path) -> None:
    rows = [{"sentence": "the cat sat", "label": label} for label in (10, 9, 2) * 4]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    source = Source(data=tmp_path / "t.jsonl", weights=write_roberta(tmp_path / "roberta"), tokens=16)
    data, shape = task("texts").load(source)
    assert shape.classes == 3
    batch = data.validation.batch(torch.arange(3))
    assert batch.labels.tolist() == [2, 0, 1]  # rows 0, 5, 10 say 10, 2, 9: in order of size
    assert batch.inputs[0][0, 0] == 0
    model = task("texts").build(shape, source)
    assert len(units_of(model)) == task("texts").preflight(source) == 8
    with pytest.raises(ValueError, match="up to 130 tokens; got tokens 200"):
        task("texts").load(Source(data=source.data, weights=source.weights, tokens=200))


def test_wrong_texts_are_named(tmp_path: Path) -> None:
    def load(path: Path) -> None:
        task("texts").load(Source(data=path))

    with pytest.raises(ValueError, match="is not there"):
        load(tmp_path / "t.csv")
    with pytest.raises(ValueError, match="is another kind"):
        load(write_csv(tmp_path / "t.txt", "text,label", 3))
    with pytest.raises(ValueError, match="has the columns words, more, kind; it should have label"):
        load(write_csv(tmp_path / "t.csv", "words,more,kind", 3))
    with pytest.raises(ValueError, match="all rows have 'y'"):
        load(write_csv(tmp_path / "t.csv", "text,label", 3, line="a,y"))
    with pytest.raises(ValueError, match="line 2 has more cells than the header"):
        load(write_csv(tmp_path / "t.csv", "text,label", 3, line="well, yes,y"))
    with pytest.raises(ValueError, match="line 3 has no label"):
        load(write_csv(tmp_path / "t.csv", "text,label", 1, line="a,y\nb"))
    with pytest.raises(ValueError, match=r"two rows or more.* it has 1"):
        load(write_csv(tmp_path / "t.csv", "text1,text2,label", 1))
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": 1}\n{"text": null, "label": 2}')
    with pytest.raises(ValueError, match="line 2 has no text"):
        load(tmp_path / "t.jsonl")
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": 1}\n{broken')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        load(tmp_path / "t.jsonl")
