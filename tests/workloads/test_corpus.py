"""Text files to windows of tokens."""

import gzip
import json

import pytest
import torch

from thinpipe.workloads.corpus import Windows, held_out, read_documents, text_files


def test_files_of_a_folder_in_a_fixed_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.rst.gz").write_bytes(gzip.compress(b"first"))
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "third"}) + "\n\n" + json.dumps({"text": "fourth"}))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    files = text_files(tmp_path)
    assert [path.name for path in files] == ["x.rst.gz", "b.txt", "c.jsonl"]
    assert read_documents(files) == ["first", "second", "third", "fourth"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "there is no text in the 1 files"),
        ("a.txt", b"PK\x00\x01", "is not text: it holds zero bytes"),
        ("a.txt", b"caf\xe9", r"is not text in UTF-8: byte 3 is 0xe9"),
        ("a.rst.gz", b"no gzip", "cannot be read"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": 1}\n', "line 2: every line is an object with a text"),
        ("a.jsonl", b"[1]", "line 1: every line"),
    ],
)
def test_what_is_no_text_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents(text_files(tmp_path / name))


def test_a_folder_without_texts_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="has no texts"):
        text_files(tmp_path)
    with pytest.raises(ValueError, match="a file or a folder"):
        text_files(tmp_path / "absent")


def test_every_twentieth_document_validates_or_the_end_of_few():
    train, validation = held_out([str(number) for number in range(40)])
    assert validation == ["0", "20"]
    assert len(train) == 38
    assert held_out(["a" * 95 + "b" * 5]) == (["a" * 95], ["b" * 5])


def test_windows_follow_each_other_and_labels_are_one_further():
    windows = Windows.of(["abc", "defgh"], lambda text: [ord(letter) for letter in text], 0, tokens=3)
    batch = windows.batch(torch.tensor([1, 0]))
    assert len(windows) == 3
    assert windows.text_bytes == 8
    assert batch.inputs[0].tolist() == [[0, 100, 101], [97, 98, 99]]
    assert batch.labels.tolist() == [[100, 101, 102], [98, 99, 0]]
    assert batch.inputs[1].tolist() == [[1, 1, 1], [1, 1, 1]]
