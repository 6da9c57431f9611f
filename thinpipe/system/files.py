"""Validated reading of untrusted files, and atomic, durable writing of files.

Libraries report "Expecting value: line 1 column 1" without the file; some raise errors other than ValueError, opening a
FIFO blocks until a process writes to it, and a few hundred kB can take minutes to parse. So all files that a user names
are read through this module: every problem with one is a ValueError that names the file, the rule, and the remedy.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinpipe.system.sizes import check_fits, size_text

TEXT_BYTES = 100_000_000  # limit of a file that is parsed in one piece; the largest tokenizers have a third of it
_TOML_BYTES = 1_000_000  # limit; a plan of 10,000 runs has a tenth of it
_LINE_BYTES = 16_000_000  # limit of a line of data; a long book has a tenth of it
_TEXT_MEMORY = 3  # bytes of memory for a byte of a text: as bytes, and as Python's text of up to two bytes a character
# A TOML key with too many parts, as in a.b.c: tomllib needs memory and time quadratic in their number.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){32}""")
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
_NUMBER_DIGITS = 309  # a number with more exceeds the largest float


def regular_size(path: Path, limit: int | None = None) -> int:
    """Return the size in bytes of a file; raise OSError unless it is regular and within the limit. It is not opened."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for holds, name in _KINDS if holds(status.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
    if limit is not None and status.st_size > limit:
        raise OSError(errno.EFBIG, f"it has {size_text(status.st_size)}, more than {size_text(limit)}", str(path))
    return status.st_size


def check_regular(path: Path, what: str, remedy: str = "name another", *, limit: int | None = None) -> None:
    """Raise ValueError unless there is a regular file of at most ``limit`` bytes. The file is not opened.

    ``what``: a description of the expected file, as in "a picture".
    """
    try:
        regular_size(path, limit)
    except OSError as error:
        problem = error.strerror
        if os.path.islink(path) and not os.path.exists(path):
            problem = f"it is a link to {os.readlink(path)}, which is not there"
        raise ValueError(f"{path} cannot be read as {what}: {problem}; {remedy}") from None


def check_folder(folder: Path, what: str) -> None:
    """Raise ValueError if a folder has special or oversized text files, which libraries would open unchecked."""
    with errors_named(folder, what):
        found = sorted(folder.iterdir())
    for path in found:
        if os.path.exists(path) and not path.is_dir():
            is_text = path.suffix in (".json", ".txt", ".model", ".jinja", ".py")
            check_regular(path, f"a part of {what}", "remove it", limit=TEXT_BYTES if is_text else None)


@contextmanager
def errors_named(path: Path | str, what: str, remedy: str = "replace it, or name another") -> Iterator[None]:
    """Convert all errors of a library that reads ``path`` into a ValueError that names the file.

    ``what``: a description of the expected file. Libraries raise any error on broken files, KeyError and SyntaxError
    too, so all errors are caught: only the library's call belongs inside.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} cannot be read as {what}: {_reason(path, error)}; {remedy}") from None


def _reason(path: Path | str, error: Exception) -> str:
    """Return the message of an error in one line, with its type if the message is no sentence, as for KeyError."""
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    if isinstance(error, OSError) and error.strerror:
        other = error.filename and str(error.filename) != str(path)
        return f"{error.filename}: {error.strerror}" if other else error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")
    return said if " " in said else f"{type(error).__name__} {said}".strip()


def read_text(path: Path, what: str, *, limit: int = TEXT_BYTES) -> str:
    """Return the text of a UTF-8 file, with or without BOM; ValueError for another encoding, with line and remedy."""
    return _decoded(path, what, read_bytes(path, what, limit=limit))


def read_bytes(path: Path, what: str, *, limit: int = TEXT_BYTES) -> bytes:
    """Return the contents of a regular file of at most ``limit`` bytes."""
    check_regular(path, what, limit=limit)
    with errors_named(path, what):
        return path.read_bytes()


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder, by relative path."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): read_bytes(path, f"a file of {folder}") for path in found}


def read_data(path: Path, what: str) -> str:
    """Return a text file that fits into memory; raise ValueError if a line is longer than _LINE_BYTES."""
    check_regular(path, what)
    check_fits(f"{path}, read as {what},", _TEXT_MEMORY * path.stat().st_size, "bring a part of it")
    with errors_named(path, what), path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES + 1), b""), 1):
            if len(line) > _LINE_BYTES:
                raise ValueError(f"line {number} has more than {size_text(_LINE_BYTES)}")
        file.seek(0)
        content = file.read()
    return _decoded(path, what, content)


def _decoded(path: Path, what: str, content: bytes) -> str:
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
    """Return the contents of a JSON file.

    ``finite``: reject numbers that are not finite floats. Python reads NaN, 1e999 and integers of a thousand digits,
    and arithmetic fails on them later.
    """
    text = read_text(path, what)
    with errors_named(path, what):
        if finite:
            return json.loads(text, parse_int=_integer, parse_float=_real, parse_constant=_constant)
        return json.loads(text)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the contents of a TOML file."""
    text = read_text(path, what, limit=_TOML_BYTES)
    long = _LONG_KEY.search(text)
    if long is not None:
        line = text.count("\n", 0, long.start()) + 1
        raise ValueError(f"{path}, line {line} cannot be read as {what}: a key has more than 32 parts; shorten it")
    with errors_named(path, what):
        return tomllib.loads(text)


def read_jsonl(path: Path, what: str) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of every line of a file of JSON lines; empty lines are skipped."""
    # Not splitlines: JSON strings may contain characters that are line ends in Unicode.
    for number, line in enumerate(read_data(path, what).split("\n"), 1):
        if line.strip():
            yield number, parse_json_line(path, number, line)


def parse_json_line(path: Path, number: int, line: str) -> Any:
    """Return the value of one line of JSON; raise ValueError that names the line."""
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


def check_writable(path: Path) -> None:
    """Raise ValueError unless a file can be written at ``path``; called before a long run, not after it."""
    if path.is_dir():
        raise ValueError(f"{path}: results go to a file, this is a directory; name a file in it")
    if path.exists() and not path.is_file():  # renaming onto /dev/null would replace it
        raise ValueError(f"{path}: results go to a file, this is a device or a pipe; name another")
    try:
        temporary = temporary_name(path)
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise ValueError(
            f"{path}: results go to a file in a directory that can be written; {path.parent}: {error.strerror}"
        ) from None


class OutputError(OSError):
    """An output file cannot be written at the end of a run; the message is for the user."""


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; if the block ends without an error, move it to ``path``, synced to disk."""
    temporary = temporary_name(path)
    try:
        yield temporary
        sync(temporary)  # before the rename: a crash must not leave an empty file in the place of the old one
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_output(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path, move the file to ``path``, and report it on stderr."""
    try:
        with replace_file(path) as temporary:
            write(temporary)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
    print(f"wrote {path}", file=sys.stderr)


def temporary_name(path: Path) -> Path:
    """Return a name on the same file system, so that renaming is atomic, with the same suffix, for format detection."""
    return path.with_name(f".{os.getpid()}.tmp.{path.name}")


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync their names to disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)


def sync(path: Path) -> None:
    """Flush a file to disk, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
