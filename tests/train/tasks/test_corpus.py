"""Text files to windows of tokens."""

import gzip
import json

import pytest
import torch

from thinpipe.train.tasks.corpus import Windows, check_texts, held_out, pieces, read_documents, text_files


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
def test_files_without_text_are_named(name, content, message, tmp_path):
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


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_id = 0
    is_fast = True

    def __call__(self, texts, **options):
        if isinstance(texts, str):
            return {"offset_mapping": [(place, place + 1) for place in range(len(texts))]}
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_windows_follow_each_other_and_labels_are_one_further():
    windows = Windows.of(["abc", "defgh"], Letters(), tokens=3)
    batch = windows.batch(torch.tensor([1, 0]))
    assert len(windows) == 3
    assert batch.inputs[0].tolist() == [[0, 100, 101], [97, 98, 99]]
    assert batch.labels.tolist() == [[100, 101, 102], [98, 99, 0]]
    assert len(batch.inputs) == 1  # nothing is padded, so there is no mask


@pytest.mark.parametrize(
    ("tokens", "labelled"),
    [(3, "bc" + "defgh"), (4, "bc" + "defgh"), (5, "bc" + "de"), (2, "bc" + "defgh"), (9, "bc" + "defgh"), (10, "")],
)
def test_bytes_are_those_of_the_labels(tokens, labelled):
    """The bytes of a b c | d e f g h | without ends, the first token and the incomplete window."""
    letters = {"b": "é", "e": "€"}  # two bytes, and three

    def spelt(text):
        return "".join(letters.get(letter, letter) for letter in text)

    windows = Windows.of([spelt("abc"), spelt("defgh")], Letters(), tokens=tokens)
    labels = windows.batch(torch.arange(len(windows))).labels.flatten().tolist()
    assert "".join(chr(label) for label in labels if label) == spelt(labelled)
    assert windows.text_bytes == len(spelt(labelled).encode())


def test_long_texts_are_encoded_in_pieces_that_lose_nothing():
    text = "".join(f"line {number} of a long text\n" for number in range(30_000))
    found = list(pieces(text))
    assert "".join(found) == text
    assert max(map(len, found)) <= 200_000
    assert all(piece.startswith("line") for piece in found)
    assert "".join(pieces("x" * 500_000)) == "x" * 500_000
    windows = Windows.of([text, "end"], Letters(), tokens=10)
    assert windows.stream.tolist() == [*map(ord, text), 0, *map(ord, "end"), 0]


def test_errors_found_at_the_beginning_of_a_file(tmp_path):
    """A cut within a character is no error, and only the beginning is read."""
    (tmp_path / "a.txt").write_text("x" + "é" * 70_000)
    check_texts(tmp_path, "data")
    (tmp_path / "b.txt").write_bytes(b"x" * 100 + b"\xff")
    with pytest.raises(ValueError, match=r"b.txt is not text in UTF-8: byte 100 is 0xff"):
        check_texts(tmp_path, "data")


def test_a_deeply_nested_line_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "[" * 200_000)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: brackets are nested too deeply"):
        read_documents(text_files(tmp_path))


def test_more_text_than_memory_is_an_error_before_reading(tmp_path, monkeypatch):
    monkeypatch.setattr("thinpipe.system.sizes.memory_bytes", lambda device="cpu": 1000)
    (tmp_path / "a.txt").write_text("x" * 501)
    with pytest.raises(ValueError, match=r"data .*: its text and tokens takes .* or more, and this machine has"):
        check_texts(tmp_path, "data")


def test_a_line_of_json_may_contain_unicode_line_ends(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one\u2028text"}, ensure_ascii=False) + "\n")
    assert read_documents([tmp_path / "a.jsonl"]) == ["one\u2028text"]
