"""Running text for language models: files or a data set of the hub to documents, documents to windows of tokens.

Documents are joined by the tokenizer's end token and cut into windows of equal length, so nothing is padded. The labels
of a window are its tokens shifted by one: the last label is the first token after the window.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinpipe.options import OptionError
from thinpipe.system.files import parse_json_line
from thinpipe.system.sizes import check_fits
from thinpipe.train.tasks.hub import PublicData, load_public, load_saved
from thinpipe.train.tasks.options import HUB
from thinpipe.train.tasks.task import IGNORED, Batch

HELD_OUT = 20  # every 20th document, or the last 20th of a text, validates
_FEW = 2 * HELD_OUT  # documents; if there are fewer, the end of each validates
SUFFIXES = (".txt", ".md", ".rst", ".text", ".jsonl")
_LOOKED_AT = 1 << 16  # bytes read of every file before workers start
# Maximum numbers of characters of one piece and of all pieces that are encoded in one call: a tokenizer needs some
# hundred bytes of memory for each new token.
_PIECE, _BATCH = 200_000, 1_000_000
_HEAD = 64  # characters of a document that its first token is found in
_OWN_SPLITS = ("validation", "valid", "test")  # of a data set: the first that it has validates


def text_files(path: Path) -> list[Path]:
    """Return the text files at a path, in a fixed order; raise ValueError if there are none."""
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


def check_texts(data: Path, option: str) -> None:
    """Raise ValueError for errors visible at the beginning of the files: nothing to read, no text, too much of it.

    ``option`` is the option that names the path, for errors.
    """
    if _is_data_set(data):
        _splits(data, option)
        return
    files = text_files(data)
    beginnings = [(path, _read(path, _LOOKED_AT)) for path in files]
    for path, text in beginnings:
        if _suffix(path) == ".jsonl" and "\n" in text:
            _lines(path, text[: text.index("\n")])
    if not any(text.strip() for _, text in beginnings):
        _check_some([], len(files))
    # The text itself, and its tokens: about four bytes of text each, stored in four bytes.
    size = 2 * sum(path.stat().st_size for path in files)
    check_fits(f"{{{option}}} {data}: its text and tokens", size, "bring less, or a part of it")


def read_texts(data: Path, validation: Path | None = None) -> tuple[list[str], list[str]]:
    """Return training and validation texts; raise ValueError that names the file if one is not text.

    Without ``validation``, the data set's own split validates, or a part of the data is held out.
    """
    train, own = _read_splits(data, "data")
    if validation is not None:
        texts, own = _read_splits(validation, "validation")
        return train, own or texts
    return (train, own) if own else held_out(train)


def _read_splits(data: Path, option: str) -> tuple[list[str], list[str]]:
    """Return all texts except those of a data set's own validation split, and the latter."""
    if not _is_data_set(data):
        return read_documents(text_files(data)), []
    train, *own = (_texts(data, rows) for rows in _splits(data, option))
    return train, own[0] if own else []


def _is_data_set(data: Path) -> bool:
    """Return True for a data set of the hub, or for a folder in the hub's format."""
    if str(data).startswith(HUB):
        return True
    return data.is_dir() and ((data / "dataset_dict.json").is_file() or any(data.rglob("*.parquet")))


def _splits(data: Path, option: str) -> list[Any]:
    """Return the rows to train on, and those to validate on if the data set has such a split."""
    name = str(data).removeprefix(HUB)
    if name == str(data):
        there = {path.stem.split("-")[0] for path in data.rglob("*.parquet")} | {path.name for path in data.iterdir()}
        own = [split for split in _OWN_SPLITS if split in there][:1]
        found = load_saved(data, ("train", *own))
    else:
        repository, part = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:]) or None
        if repository.count("/") != 1 or not all(repository.split("/")):
            raise OptionError(f"{{{option}}} hub:org/name, or hub:org/name/part, is a data set of the hub; got {data}")
        found = load_public("lm", PublicData(repository=repository, part=part))
    if "train" not in found:
        raise OptionError(f"{{{option}}} {data} has no split `train`; it has {', '.join(found)}")
    for rows in found.values():
        if "text" not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise OptionError(f"{{{option}}} {data}: texts are in a column `text`; it has {columns}")
    return [found["train"], *([found[split] for split in _OWN_SPLITS if split in found][:1])]


def _texts(data: Path, rows: Any) -> list[str]:
    texts = rows["text"][:]
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{data}, row {number}: a text is expected, and this is {text!r}")
    return _check_some(texts, 1)


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def read_documents(files: Sequence[Path]) -> list[str]:
    """Return the non-empty texts of all files; raise ValueError that names the first file that is not text."""
    documents: list[str] = []
    for path in files:
        text = _read(path)
        documents += _lines(path, text) if _suffix(path) == ".jsonl" else [text]
    return _check_some(documents, len(files))


def _check_some(documents: Sequence[str], files: int) -> list[str]:
    """Return the non-empty documents; raise ValueError if there are none."""
    found = [text for text in documents if text.strip()]
    if not found:
        raise ValueError(f"there is no text in the {files} files that were read; all are empty")
    return found


def _read(path: Path, most: int | None = None) -> str:
    """Return the text of a file, or of its first bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data: bytes = file.read(-1 if most is None else most)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if b"\0" in data:
        raise ValueError(f"{path} is not text: it holds zero bytes")
    try:
        # Strips the byte order mark that some editors add; the first bytes may end within a character.
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=most is None or len(data) < most)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


def _lines(path: Path, text: str) -> list[str]:
    """Return the field ``text`` of every line of JSON."""
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            row = parse_json_line(path, number, line)
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise ValueError(f'{path}, line {number}: every line is an object with a text, as in {{"text": "..."}}')
            documents.append(row["text"])
    return documents


def held_out(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return training and validation texts: every 20th document validates, or the end of each if there are few."""
    if len(documents) >= _FEW:
        return [text for number, text in enumerate(documents) if number % HELD_OUT], list(documents[::HELD_OUT])
    pairs = [(text, len(text) - len(text) // HELD_OUT) for text in documents]
    return [text[:cut] for text, cut in pairs], [text[cut:] for text, cut in pairs]


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that encode as the full text would: cut at a line's start, or else at a space."""
    while len(text) > _PIECE:
        cut = text.rfind("\n", _PIECE // 2, _PIECE) + 1 or text.rfind(" ", _PIECE // 2, _PIECE)
        cut = cut if cut > 0 else _PIECE
        yield text[:cut]
        text = text[cut:]
    if text:
        yield text


def batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield the pieces of all documents in batches; an empty piece marks the end of each document."""
    batch: list[str] = []
    size = 0
    for text in documents:
        for piece in (*pieces(text), ""):
            batch.append(piece)
            size += len(piece)
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of one long sequence of tokens."""

    stream: Tensor  # int32
    tokens: int  # per window
    text_bytes: int  # of the text of all labels, in UTF-8
    starts: Tensor | None = None  # places of the first tokens of documents, if attention does not cross documents
    repeats: ClassVar[bool] = True

    @staticmethod
    def of(documents: Iterable[str], tokenizer: Any, tokens: int, *, packed: bool = False) -> Windows:
        """Return the windows of documents; ``tokenizer`` is one of transformers."""
        end: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        parts: list[Tensor] = []
        encoded: list[tuple[str, int]] = []  # piece, and its number of tokens
        for batch in batches(documents):
            ids = _encode(tokenizer, batch, end)
            encoded += zip(batch, map(len, ids), strict=True)
            parts.append(torch.tensor(list(chain.from_iterable(ids)), dtype=torch.int32))
        windows = Windows(stream=torch.cat(parts), tokens=tokens, text_bytes=0)
        last = len(windows) * tokens + 1  # after the last label; the first label is token 1
        labelled = _bytes_before(last, encoded, tokenizer) - _bytes_before(min(1, last), encoded, tokenizer)
        windows = replace(windows, text_bytes=labelled)
        return windows._packed(encoded, tokenizer, last) if packed else windows

    def _packed(self, encoded: Sequence[tuple[str, int]], tokenizer: Any, last: int) -> Windows:
        """Return the windows with the starts of documents, whose first tokens are predicted from nothing."""
        before = torch.tensor([0, *(count for _, count in encoded)]).cumsum(0)[:-1]
        first = [number for number in range(len(encoded)) if number == 0 or not encoded[number - 1][0]]
        first = [number for number in first if encoded[number][1] and encoded[number][0]]
        starts = before[first]
        heads = [encoded[number][0] for number, start in zip(first, starts.tolist(), strict=True) if 0 < start < last]
        lost = sum(len(_beginning(head[:_HEAD], 1, tokenizer).encode()) for head in heads)
        return replace(self, starts=starts, text_bytes=self.text_bytes - lost)

    def __len__(self) -> int:
        return max((len(self.stream) - 1) // self.tokens, 0)

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        """Return the windows of these numbers; they have no padding, so no mask."""
        places = indices[:, None] * self.tokens + torch.arange(self.tokens + 1)
        rows = self.stream[places].long()
        inputs, labels = (rows[:, :-1].contiguous(),), rows[:, 1:].contiguous()
        if self.starts is None:
            return Batch(inputs=inputs, labels=labels)
        start = self.starts[torch.searchsorted(self.starts, places, right=True) - 1]
        positions = (places - torch.maximum(start, places[:, :1]))[:, :-1].contiguous()
        return Batch(inputs=(*inputs, positions), labels=labels.masked_fill((start == places)[:, 1:], IGNORED))

    def describe(self, indices: Tensor) -> dict[str, bytes]:
        return {"texts": self.stream[: len(self) * self.tokens + 1].numpy().tobytes()}


def _encode(tokenizer: Any, batch: Sequence[str], end: list[int]) -> list[list[int]]:
    ids = tokenizer(list(batch), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [list(each) if piece else end for piece, each in zip(batch, ids, strict=True)]


def _bytes_before(token: int, encoded: Sequence[tuple[str, int]], tokenizer: Any) -> int:
    """Return the number of text bytes of the first ``token`` tokens; the end token of a document has none."""
    size = 0
    for piece, count in encoded:
        if count > token:
            return size + len(_beginning(piece, token, tokenizer).encode())
        size, token = size + len(piece.encode()), token - count
    return size


def _beginning(piece: str, tokens: int, tokenizer: Any) -> str:
    """Return the text of the first tokens of a piece."""
    if not tokens:
        return ""
    if not tokenizer.is_fast:
        return str(tokenizer.decode(_encode(tokenizer, [piece], [])[0][:tokens]))
    places = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return piece[: places[tokens][0]]
