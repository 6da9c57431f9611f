"""Files that users bring: every way to be wrong is one line that names the file, the line, the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinpipe.system import files
from thinpipe.system.files import (
    check_folder,
    errors_named,
    make_folder,
    read_data,
    read_json,
    read_jsonl,
    read_text,
    read_toml,
    replace_file,
)

NESTED = "[" * 100_000


def error_of(read: Callable[..., Any], path: Path, **options: Any) -> str:
    with pytest.raises(ValueError, match=str(path)) as error:
        list(read(path, "a table", **options))
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "a\nb\né".encode("latin-1"),
            "line 3 cannot be read as a table: text is in UTF-8, and byte 4, 0xe9, is not; if it is Latin-1, ",
        ),
        ("é\n".encode("utf-16"), "begins with the mark of UTF-16; convert it with: iconv -f UTF-16 -t UTF-8"),
        ("é\n".encode("utf-32"), "iconv -f UTF-32 -t UTF-8"),
        (
            "a\nb".encode("utf-16-le"),
            "line 1 cannot be read as a table: text is in UTF-8, and this has NUL bytes; if it is UTF-16",
        ),
        (b"a\nb\0c", "line 2 cannot be read as a table: text is in UTF-8, and this has NUL bytes"),
    ],
    ids=["latin-1", "utf-16", "utf-32", "utf-16-unmarked", "nul"],
)
def test_other_encodings_are_named_with_the_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    assert message in error_of(read_text, path)


def test_a_mark_of_utf_8_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("ü".encode("utf-8-sig"))
    assert read_text(path, "a table") == "ü"


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_json, "", "Expecting value: line 1"),
        (read_json, NESTED, "brackets are nested too deeply"),
        (read_json, "1" * 5000, "Exceeds the limit"),
        (read_toml, "a =", "Invalid value (at end of document)"),
        (read_toml, f"a = {NESTED}", "brackets are nested too deeply"),
        (read_jsonl, f'{{"a": 1}}\n\n{NESTED}', "line 3: brackets are nested too deeply"),
        (read_jsonl, "1\n{", "line 2 is not JSON"),
        (read_jsonl, "1" * 5000, "line 1 is not JSON: Exceeds the limit"),
    ],
)
def test_invalid_contents_are_named(tmp_path: Path, read: Callable[..., Any], content: str, message: str) -> None:
    path = tmp_path / "t"
    path.write_text(content)
    assert message in error_of(read, path)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 400])
def test_numbers_that_are_not_finite_floats_are_rejected_on_request(tmp_path: Path, number: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(number)
    assert "cannot be read as a table: " in error_of(read_json, path, finite=True)


def test_ends_of_lines_in_texts_of_json_are_none_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('"a\u2028b"\r\n"c"\n', encoding="utf-8", newline="")
    assert list(read_jsonl(path, "a table")) == [(1, "a\u2028b"), (2, "c")]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "it is a directory, not a file"),
        (os.mkfifo, "it is a pipe (FIFO), not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
        (lambda path: path.symlink_to("nowhere"), "it is a link to nowhere, which is not there"),
        (lambda path: None, "No such file or directory"),
    ],
    ids=["directory", "fifo", "device", "dead-link", "missing"],
)
def test_special_files_are_never_opened(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    make(tmp_path / "t")
    assert message in error_of(read_text, tmp_path / "t")


def write_sparse(path: Path, size: int, beginning: bytes = b"") -> None:
    """Write a file of any size that takes no room on the disk."""
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(size)


@pytest.mark.parametrize("read", [read_text, read_json, read_toml])
def test_files_that_are_parsed_in_one_piece_have_a_limit(tmp_path: Path, read: Callable[..., Any]) -> None:
    write_sparse(tmp_path / "t", 1 << 40)
    assert "t cannot be read as a table: it has 1.1 TB, more than 1" in error_of(read, tmp_path / "t")


@pytest.mark.parametrize("read", [read_data, read_jsonl])
def test_data_may_be_as_large_as_memory(tmp_path: Path, read: Callable[..., Any]) -> None:
    write_sparse(tmp_path / "t", 1 << 42)
    assert "t, read as a table, takes 13.19 TB or more, and this machine has " in error_of(read, tmp_path / "t")


@pytest.mark.parametrize("read", [read_data, read_jsonl])
def test_a_giant_line_is_named_before_the_file_is_read(tmp_path: Path, read: Callable[..., Any]) -> None:
    write_sparse(tmp_path / "t", 1 << 28, b"1\n2\n")
    assert "t cannot be read as a table: line 3 has more than 16 MB; " in error_of(read, tmp_path / "t")


@pytest.mark.parametrize("part", ["a", "'a b'", '"a\'b"'])
@pytest.mark.parametrize("frame", ["{} = 1", "[{}]", "[[ {} ]]", "a = [1, {{ {} = 1 }}]"])
def test_keys_of_many_parts_are_refused(tmp_path: Path, part: str, frame: str) -> None:
    path = tmp_path / "t"
    path.write_text("b = 1\n" + frame.format(" . ".join([part] * 32)))
    assert read_toml(path, "a table")["b"] == 1
    path.write_text("b = 1\n" + frame.format(".".join([part] * 60_000)))
    assert "line 2 cannot be read as a table: a key has more than 32 parts" in error_of(read_toml, path)


def test_folders_of_libraries_have_no_special_and_no_giant_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "dead").symlink_to("nowhere")
    (tmp_path / "linked.json").symlink_to(tmp_path / "outside" / "blob")  # as in the cache of the hub
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "blob").write_text("{}")
    write_sparse(tmp_path / "model.safetensors", 1 << 40)
    check_folder(tmp_path, "a tokenizer")
    os.mkfifo(tmp_path / "special")
    assert "special cannot be read as a part of a table: it is a pipe (FIFO), not a file" in error_of(
        lambda path, what: check_folder(tmp_path, what), tmp_path / "special"
    )
    (tmp_path / "special").unlink()
    write_sparse(tmp_path / "tokenizer.json", 1 << 40)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot .*: it has 1\.1 TB, more than 100 MB"):
        check_folder(tmp_path, "a tokenizer")


def test_a_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    synced: list[tuple[str, str]] = []
    monkeypatch.setattr(files, "sync", lambda each: synced.append((each.suffix, path.read_text())))
    with replace_file(path) as temporary:
        temporary.write_text("new")
    assert synced == [(".json", "old"), (tmp_path.suffix, "new")]


def test_new_folders_are_on_disk_in_those_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync", synced.append)
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [tmp_path / "a", tmp_path]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_errors_of_libraries_are_reported_in_one_line() -> None:
    for error, message in (
        (KeyError(1785425525), "KeyError 1785425525"),
        (RuntimeError("it broke.\nIn C++ here\nand there"), "it broke"),
        (PermissionError(13, "Permission denied", "other"), "other: Permission denied"),
        (AssertionError(), "AssertionError"),
    ):
        with (
            pytest.raises(ValueError, match=r"^x cannot be read as a picture: ") as caught,
            errors_named("x", "a picture"),
        ):
            raise error
        assert str(caught.value) == f"x cannot be read as a picture: {message}; replace it, or name another"
