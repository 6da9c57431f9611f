"""One worker's part of a checkpoint: named tensors as a safetensors file, with the hash of its bytes.

The file is written as a stream of pieces. So a part needs no memory in addition to the tensors, its hash is that of the
values in memory, and the same stream is sent to the client if the client keeps all parts. Parts are read by the
safetensors library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_128

from thinpipe.comm.streams import PIECE, HashedPieces, memory_of, tensor_pieces
from thinpipe.system.files import regular_size
from thinpipe.train.models.save import TensorFile


class DamagedError(ValueError):
    """A checkpoint differs from what was saved; the message names the file and the problem."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The manifest's entry for a part: name, size and hash."""

    name: str
    bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"part-\d+\.safetensors", self.name):
            raise ValueError(f"a part is part-N.safetensors, got {self.name!r}")


def part_name(worker: int) -> str:
    return f"part-{worker}.safetensors"


class PartStream:
    """The bytes of a safetensors file: a header with the position of each tensor, then the tensors."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        file = TensorFile(state)
        self._header, self.bytes = file.header, file.bytes
        self._tensors = [state[name] for name in file.names]

    def pieces(self) -> Iterator[Tensor]:
        """Yield the bytes as uint8 tensors on the CPU, at most ``PIECE`` each."""
        yield from torch.frombuffer(bytearray(self._header), dtype=torch.uint8).split(PIECE)
        yield from tensor_pieces(self._tensors)


def write_pieces(path: Path, pieces: Iterable[Tensor]) -> Part:
    """Write pieces to a new file, synced to disk on return; remove the file after an error."""
    hashed = HashedPieces(pieces)
    try:
        with path.open("xb", buffering=0) as file:  # a buffer would retry the write that a full disk rejected
            for piece in hashed:
                data = memory_of(piece)
                while data:
                    data = data[file.write(data) :]
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    return Part(name=path.name, bytes=hashed.bytes, xxh3_128=hashed.hexdigest())


def read_part(directory: Path, part: Part, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the wanted tensors of a part, on the CPU; a part that has any is verified first."""
    path = directory / part.name
    _check_size(path, part)
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if wanted(name)]  # noqa: SIM118, it is no dict
            if names:
                verify_part(directory, part)
            # The library returns the mapped file: copy, since the tensors must not change if the file is deleted.
            return {name: file.get_tensor(name).clone() for name in names}
    except OSError as error:
        raise DamagedError(f"{part.name}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise DamagedError(f"{part.name}: {error}") from None


def verify_part(directory: Path, part: Part) -> None:
    """Raise DamagedError unless the file has the size and the hash that were saved."""
    _check_size(directory / part.name, part)
    found = xxh3_128()
    try:
        with (directory / part.name).open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(PIECE))
            while count := file.readinto(buffer):
                found.update(buffer[:count])
    except OSError as error:
        raise DamagedError(f"{part.name}: {error.strerror or error}") from None
    if found.hexdigest() != part.xxh3_128:
        raise DamagedError(f"{part.name}: hash {found.hexdigest()}, and {part.xxh3_128} was saved")


def _check_size(path: Path, part: Part) -> None:
    """Raise DamagedError unless there is a regular file of the size that was saved."""
    try:
        size = regular_size(path)
    except OSError as error:
        raise DamagedError(f"{part.name}: {error.strerror or error}") from None
    if size != part.bytes:
        raise DamagedError(f"{part.name} has {size} bytes, and {part.bytes} were saved")
