"""Data and weights that are broken: each is refused before training, in one line that names the file and the line."""

from __future__ import annotations

import json
import os
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tasks.written import write_glue, write_picture, write_roberta
from thinpipe.train.tasks.hub import class_numbers
from thinpipe.train.tasks.mobilenet import mobilenet_bytes, new_mobilenet
from thinpipe.train.tasks.roberta import SMALL, new_roberta, roberta_bytes
from thinpipe.train.tasks.task import Shape, Source, Task
from thinpipe.train.tasks.tasks import task


def refused(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(ValueError, match=" ") as error:
        function(*arguments)
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t.csv",
            "text,label\na,y\né,n\n".encode("latin-1"),
            "t.csv, line 3 cannot be read as a table: text is in UTF-8",
        ),
        (
            "t.jsonl",
            '{"text": "é", "label": 1}'.encode("utf-16"),
            "t.jsonl cannot be read as a table of JSON lines: text is in UTF-8",
        ),
        ("t.jsonl", b'{"text": "a", "label": 1}\n' + b"[" * 100_000, "t.jsonl, line 2: brackets are nested too deeply"),
        ("t.csv", b"text,label\n,y\n ,n\n", "t.csv, line 2 and every other have no text"),
        ("t.csv", b"text,label\na,y\nb,nan\nc,n\n", "t.csv, line 3: a label is a word or a finite number; it is nan"),
        ("t.jsonl", b'{"text": "a", "label": NaN}\n{"text": "b", "label": 1}', "line 1: a label is a word or a finite"),
        (
            "t.csv",
            b"text,label\na\0,y\nb,n\n",
            "t.csv, line 2 cannot be read as a table: text is in UTF-8, and this has NUL bytes",
        ),
        ("t.csv", b"text,label\na,y\nb, \nc,n\n", "t.csv, line 3 has no label"),
        ("t.csv", b'text,label\n"a,y\nb,n\n', "t.csv, line 2: unexpected end of data in the row that begins here"),
        ("t.csv", b"text,text,label\na,b,y\nc,d,n\n", "line 1 names the column text twice"),
        ("t.csv", b"text;label\na;y\nb;n\n", "has the columns text;label; it should have label"),
        (
            "t.csv",
            b"text,label\n" + b"".join(b"a,%d\n" % n for n in range(20)),
            "all 20 rows have a label of their own",
        ),
        ("t.csv", b"", "should have two rows or more"),
        ("t.jsonl", b'{"text": ["a"], "label": 1}\n{"text": "b", "label": 0}', "line 1: text should be a text"),
        ("t.jsonl", b'{"text": "\\ud800", "label": 1}\n{"text": "b", "label": 0}', "line 1: text has half a character"),
    ],
)
def test_tables(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    line = refused(task("texts").load, Source(data=path))
    assert str(path) in line
    assert message in line


def bomb(path: Path) -> None:
    """A PNG that says it has 900 million pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""))


def bind(path: Path) -> None:
    os.chdir(path.parent)  # the name of a socket is short
    socket.socket(socket.AF_UNIX).bind(path.name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bomb, "exceeds limit of 178956970 pixels"),
        (os.mkfifo, "it is a pipe (FIFO), not a file"),
        (bind, "it is a socket, not a file"),
        (lambda path: path.mkdir(), "it is a directory, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
        (lambda path: path.symlink_to("gone.png"), "it is a link to gone.png, which is not there"),
        (lambda path: path.write_bytes(b""), "cannot identify image file"),
    ],
    ids=["bomb", "fifo", "socket", "directory", "device", "dead-link", "empty"],
)
def test_files_with_the_name_of_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        for index in range(2):
            write_picture(tmp_path / name / f"{index}.jpg", seed=index)
    make(tmp_path / "dog" / "x.png")
    line = refused(task("images").load, Source(data=tmp_path, pretrained=False, image_size=32))
    assert line.startswith(f"{tmp_path / 'dog' / 'x.png'} cannot be read as a picture: ")
    assert message in line


def test_a_class_of_which_nothing_is_left_to_train(tmp_path: Path) -> None:
    for name in ("cat/0.png", "dog/0.png", "dog/1.png"):
        write_picture(tmp_path / name)
    line = refused(task("images").load, Source(data=tmp_path, pretrained=False, image_size=32))
    assert line.startswith(f"{tmp_path / 'cat'} has a single picture")


def test_data_sets(tmp_path: Path) -> None:
    only, junk = tmp_path / "only", tmp_path / "junk" / "rte"
    only.mkdir()
    (only / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    line = refused(task("rte").load, Source(data=only, pretrained=False))
    assert line.startswith(f"{only} cannot be read as a data set that save_to_disk wrote: ")
    junk.mkdir(parents=True)
    for split in ("train", "validation"):
        (junk / f"{split}-0.parquet").write_text("junk")
    line = refused(task("rte").load, Source(data=junk.parent, pretrained=False))
    assert line.startswith(f"{junk / 'train-0.parquet'} cannot be read as parquet: ")


@pytest.mark.parametrize("label", [-1, None, True, 10**12])
def test_labels_that_are_no_classes(label: Any) -> None:
    assert refused(class_numbers, "rte", "label", [0, 1, label]).endswith(
        "Remove the row, or number the classes from 0"
    )


def test_a_text_that_is_missing(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict({"sentence": ["a", None], "label": [0, 1]})
    DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(tmp_path / "cola"))
    line = refused(task("cola").load, Source(data=tmp_path / "cola", pretrained=False))
    assert "sentence are texts; row 1 has (None,)" in line


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_roberta(tmp_path_factory.mktemp("weights") / "roberta")


def spoil(folder: Path, what: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    if what == "pickle":
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_text("junk junk junk")
    elif what == "safetensors":
        (folder / "model.safetensors").write_text("junk junk junk")
    elif what == "gone":
        (folder / "model.safetensors").unlink()
    elif what == "shapes":
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    elif what == "kernel":
        (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "evil/kernel"}))
    elif what == "index":
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../good/model.safetensors"}}')
    elif what == "special":
        os.mkfifo(folder / "special_tokens_map.json")
    else:
        (folder / "config.json").write_text(what)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("{", "config.json cannot be read as the description of a model: Expecting property name"),
        ("[]", "config.json cannot be read as the description of a model: it is no object"),
        ('{"model_type": "roberta"}', "should have num_hidden_layers, a whole number; it has None"),
        ("safetensors", "model.safetensors cannot be read as safetensors: "),
        ("pickle", "pytorch_model.bin cannot be read as weights: "),
        ("gone", "has no model.safetensors. Save the model again with save_pretrained"),
        ("shapes", " has another shape; bring the model's own"),
        ("kernel", 'attn_implementation "evil/kernel" is code of the hub'),
        ("index", "names files of its own folder, got '../good/model.safetensors'"),
        ("special", "special_tokens_map.json cannot be read as a part of a model: it is a pipe (FIFO)"),
    ],
)
def test_weights(tmp_path: Path, roberta: Path, what: str, message: str) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    for file in roberta.iterdir():
        (folder / file.name).symlink_to(file)
    for name in ("config.json", "model.safetensors"):  # those that are written to
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    spoil(folder, what)
    source, texts = Source(weights=folder), task("rte")

    def use() -> None:
        assert isinstance(texts, Task)
        super(type(texts), texts).preflight(source)
        texts.build(Shape(classes=2, tokens=16, vocabulary=300), source)

    line = refused(use)
    assert str(folder) in line
    assert message in line


def test_an_intact_checkpoint_is_accepted(roberta: Path) -> None:
    model = task("rte").build(Shape(classes=3, tokens=16, vocabulary=300), Source(weights=roberta))
    assert model.config.num_labels == 3


@pytest.mark.parametrize("width", [0.35, 1, 4])
def test_the_lower_bound_of_weights_is_near_their_size(width: float) -> None:
    with torch.device("meta"):
        mobilenet = new_mobilenet(Shape(classes=10, image_size=32), width)
        roberta_ = new_roberta(Shape(classes=2, tokens=17, vocabulary=100), SMALL, max(1, width))
    for model, least in ((mobilenet, mobilenet_bytes(width)), (roberta_, roberta_bytes(SMALL, max(1, width)))):
        real = 4 * sum(parameter.numel() for parameter in model.parameters())
        assert 0.8 * real <= least <= real


def test_images_larger_than_memory() -> None:
    line = refused(task("digits").preflight, Source(image_size=1_000_000))
    assert line.startswith("image_size 1000000: the data, 1797 images, takes 7.188 PB or more, and this machine has ")


def test_texts_larger_than_memory() -> None:
    line = refused(task("grammar").preflight, Source(tokens=10**12))
    assert line.startswith("tokens 1000000000000: the data, 9000 texts, takes 144 PB or more, and this machine has ")


def test_glue_is_read_unchanged(tmp_path: Path) -> None:
    data, shape = task("cola").load(Source(data=write_glue(tmp_path / "g", "cola"), pretrained=False))
    assert (len(data.train), shape.classes) == (40, 2)
