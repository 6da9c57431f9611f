"""Files that users bring, and files that are written whole or not at all.

Libraries say "Expecting value: line 1 column 1" and leave out of which file; some raise errors that are no ValueError
at all, and a pipe that nobody writes to is waited for without end. Whoever reads a user's file reads it through here:
whatever is wrong with it is a ValueError that names it, the rule, and what to do.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_TOO_DEEP = "brackets are nested too deeply"
_NUMBER_DIGITS = 309  # a number with more is above what a float can be


def check_regular(path: Path, what: str, remedy: str = "name another") -> None:
    """ValueError unless there is a regular file. It is not opened: to open a pipe is to wait for whoever writes to it.

    ``what`` the file should be, as in "a picture".
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        there = f"it is a link to {os.readlink(path)}, which is not there" if path.is_symlink() else error.strerror
        raise ValueError(f"{path} cannot be read as {what}: {there}; {remedy}") from None
    if not stat.S_ISREG(mode):
        kind = next((name for holds, name in _KINDS if holds(mode)), "something else")
        raise ValueError(f"{path} cannot be read as {what}: it is {kind}, not a file; {remedy}")


@contextmanager
def errors_named(path: Path | str, what: str, remedy: str = "replace it, or name another") -> Iterator[None]:
    """Inside, a library reads ``path``: what it raises becomes a ValueError that names the file.

    ``what`` the file should be. Libraries raise anything on broken files, KeyError and SyntaxError too, so all errors
    are caught: only the library's call belongs inside.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} cannot be read as {what}: {_reason(path, error)}; {remedy}") from None


def _reason(path: Path | str, error: Exception) -> str:
    """What an error says, in one line; with its kind where that is no sentence, as of a KeyError."""
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    if isinstance(error, OSError) and error.strerror:
        other = error.filename and str(error.filename) != str(path)
        return f"{error.filename}: {error.strerror}" if other else error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")
    return said if " " in said else f"{type(error).__name__} {said}".strip()


def read_text(path: Path, what: str) -> str:
    """A text file in UTF-8, with or without its mark; another encoding is named with the line and the remedy."""
    check_regular(path, what)
    with errors_named(path, what):
        content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(_other_encoding(path, what, content, error)) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(
            f"{path}, line {line} cannot be read as {what}: text is in UTF-8, and this has NUL bytes; "
            f"if it is UTF-16, {_convert('UTF-16LE', path)}; else write it anew"
        )
    return text


def read_json(path: Path, what: str, *, finite: bool = False) -> Any:
    """What a JSON file holds.

    ``finite``: numbers that no float can be are refused. Python reads NaN, 1e999 and a thousand digits, and arithmetic
    stumbles over them later.
    """
    text = read_text(path, what)
    with errors_named(path, what):
        if finite:
            return json.loads(text, parse_int=_integer, parse_float=_real, parse_constant=_constant)
        return json.loads(text)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """What a TOML file holds."""
    text = read_text(path, what)
    with errors_named(path, what):
        return tomllib.loads(text)


def read_jsonl(path: Path, what: str) -> Iterator[tuple[int, Any]]:
    """What every line of a file of JSON lines holds, with the line's number; empty lines are passed over."""
    # Not splitlines: a text in JSON may hold characters that Unicode counts as ends of lines.
    for number, line in enumerate(read_text(path, what).split("\n"), 1):
        if line.strip():
            yield number, parse_json_line(path, number, line)


def parse_json_line(path: Path, number: int, line: str) -> Any:
    """One line of JSON; ValueError that names the line."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError(f"{path}, line {number}: {_TOO_DEEP}; correct the line") from None
    except ValueError as error:  # JSONDecodeError, or a number of thousands of digits
        raise ValueError(
            f"{path}, line {number} is not JSON: {str(error).partition(';')[0]}; correct the line"
        ) from None


def _integer(text: str) -> int:
    if len(text) > _NUMBER_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text} is too large")
    return value


def _constant(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")


def _other_encoding(path: Path, what: str, content: bytes, error: UnicodeDecodeError) -> str:
    marked = next((name for mark, name in _MARKS if content.startswith(mark)), None)
    if marked is not None:
        begins = f"text is in UTF-8, and this begins with the mark of {marked}"
        return f"{path} cannot be read as {what}: {begins}; {_convert(marked, path)}"
    line = content.count(b"\n", 0, error.start) + 1
    return (
        f"{path}, line {line} cannot be read as {what}: text is in UTF-8, and byte {error.start}, "
        f"0x{content[error.start]:02x}, is not; if it is Latin-1, {_convert('LATIN1', path)}"
    )


def _convert(encoding: str, path: Path) -> str:
    return f"convert it with: iconv -f {encoding} -t UTF-8 {path.name} > new{path.suffix}"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write what is to be at ``path``: it gets there when the block has ended without an error."""
    temporary = temporary_beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_beside(path: Path) -> Path:
    """A name on the same file system, so that renaming it is atomic; it ends alike, which tells writers the format."""
    return path.with_name(f".{os.getpid()}.tmp.{path.name}")


def sync(directory: Path) -> None:
    """A name is on disk when its folder is."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
