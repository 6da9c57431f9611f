"""Running text for language models: files to documents, documents to windows of tokens.

Documents are joined by the tokenizer's end token and cut into windows of equal length, so that nothing is padded. A
window's labels are its own tokens, one further: the last label is the first token of what follows.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.workloads.task import Batch

HELD_OUT = 20  # every so many documents, or the last such part of a text, validates
_FEW = 2 * HELD_OUT  # documents; with fewer, each gives its end
SUFFIXES = (".txt", ".md", ".rst", ".text", ".jsonl")


def text_files(path: Path) -> list[Path]:
    """The files that a user means by a path, in a fixed order; ValueError if there are none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"texts are read from a file or a folder, and {path} is none")
    found = sorted(each for each in path.rglob("*") if each.is_file() and _suffix(each) in SUFFIXES)
    if not found:
        raise ValueError(
            f"{path} has no texts: files that end in {', '.join(SUFFIXES)}, or in one of these and .gz, are read"
        )
    return found


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def read_documents(files: Iterable[Path]) -> list[str]:
    """The texts of all files that are not empty; ValueError that names the first file that is no text."""
    documents: list[str] = []
    count = 0
    for path in files:
        count += 1
        text = _read(path)
        documents += _lines(path, text) if _suffix(path) == ".jsonl" else [text]
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"there is no text in the {count} files that were read; all are empty")
    return documents


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if b"\0" in data:
        raise ValueError(f"{path} is not text: it holds zero bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


def _lines(path: Path, text: str) -> list[str]:
    """The field ``text`` of every line of JSON."""
    documents = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, TypeError, KeyError):
            document = None
        if not isinstance(document, str):
            raise ValueError(f'{path}, line {number}: every line is an object with a text, as in {{"text": "..."}}')
        documents.append(document)
    return documents


def held_out(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Training and validation texts: every twentieth document, or the end of each where there are few."""
    if len(documents) >= _FEW:
        train = [text for number, text in enumerate(documents) if number % HELD_OUT]
        return train, list(documents[::HELD_OUT])
    cuts = [len(text) - len(text) // HELD_OUT for text in documents]
    pairs = list(zip(documents, cuts, strict=True))
    return [text[:cut] for text, cut in pairs], [text[cut:] for text, cut in pairs]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of one long row of tokens."""

    stream: Tensor  # int32
    tokens: int  # of a window
    text_bytes: int  # of what the tokens stand for, in UTF-8

    @staticmethod
    def of(documents: Iterable[str], encode: Callable[[str], list[int]], end: int | None, tokens: int) -> Windows:
        pieces: list[Tensor] = []
        size = 0
        for text in documents:
            size += len(text.encode())
            pieces.append(torch.tensor(encode(text) + ([] if end is None else [end]), dtype=torch.int32))
        return Windows(stream=torch.cat(pieces), tokens=tokens, text_bytes=size)

    def __len__(self) -> int:
        return max((len(self.stream) - 1) // self.tokens, 0)

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        """The windows of these numbers; nothing about them is random, nor padded: they need no mask."""
        places = indices[:, None] * self.tokens + torch.arange(self.tokens + 1)
        rows = self.stream[places].long()
        return Batch(inputs=(rows[:, :-1].contiguous(),), labels=rows[:, 1:].contiguous())

    def describe(self, indices: Tensor) -> dict[str, bytes]:
        """All tokens."""
        return {"texts": self.stream[: len(self) * self.tokens + 1].numpy().tobytes()}
