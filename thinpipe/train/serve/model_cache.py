"""The cache of a server: folders of models, of which it has the tensors that its runs have needed.

    CACHE/KEY-1/config.json             from the manifest, written for every run
    CACHE/KEY-1/model.safetensors       sparse: the layout of all tensors, the bytes of some
    CACHE/KEY-1/blocks.json             which blocks of BLOCK bytes of each tensor are there
    CACHE/KEY-1/lock                    held by the run that uses the folder; its time is that of the last use

KEY is a hash of the manifest, the number that of the worker: two workers of a run on one machine need other layers. A
folder in use is never changed or removed by another run, since loaded tensors may be mapped from it. The list of blocks
is a hint, written after they are synced: a run compares the hash of every block that it uses with the client's, so a
damaged block, or one of other weights, is fetched again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from thinpipe.system.files import read_json, replace_file
from thinpipe.system.sizes import size_text
from thinpipe.system.tensors import dtype_named, spec_bytes
from thinpipe.train.models.save import TensorFile
from thinpipe.train.serve.file_manifest import FolderFiles

BLOCK = 4 << 20  # bytes that are hashed, sent and listed together
_LOCK, _BLOCKS = "lock", "blocks.json"
_MOST_FOLDERS = 64  # of one model in use at a time
_HEADER_BYTES = 256  # of a tensor in the header of its file


class ModelCache:
    """The folder that holds all files that clients cause a server to write, and its limit in bytes."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        with self.errors_named():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Raise ValueError, in one line, for errors of the disk."""
        try:
            yield
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space, or name another folder" if is_full else "name a folder that can be written"
            raise ValueError(f"model files are kept in {self.folder}: {error.strerror or error}; {remedy}") from None

    def used_bytes(self) -> int:
        """Return the bytes on disk: files are sparse."""
        return sum(_disk_bytes(each) for each in self.folder.iterdir())

    def reserve(self, needed: int, what: str) -> None:
        """Make room for further bytes by removing the folders that were not used for longest; raise ValueError."""
        with self.errors_named():
            unused = sorted((each for each in self.folder.glob("*-*") if _is_folder(each)), key=_last_use)
            while unused and needed <= self.limit_bytes < self.used_bytes() + needed:
                self._remove(unused.pop(0))
            used, free = self.used_bytes(), shutil.disk_usage(self.folder).free
        if used + needed > self.limit_bytes:
            raise ValueError(
                f"{what} needs {size_text(needed)}, and the folder of model files may have "
                f"{size_text(self.limit_bytes)}, of which {size_text(used)} are in use: raise its limit on the server"
            )
        if needed > free:
            raise ValueError(
                f"{what} needs {size_text(needed)}, and the disk of {self.folder} has {size_text(free)}: free some "
                "space on the server, or name another folder there"
            )

    def _remove(self, folder: Path) -> None:
        handle = _lock(folder)
        if handle is not None:
            # While locked. A process that opened the lock before takes it for a folder that is gone.
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)

    def open(self, files: FolderFiles, worker: int) -> CachedFolder:
        """Return the folder of a model, locked until it is closed; of several in use the first free one."""
        self.reserve(
            sum(map(len, files.files.values())) + _HEADER_BYTES * len(files.tensors), "the model's description"
        )
        with self.errors_named():
            for number in (worker, *(each for each in range(_MOST_FOLDERS) if each != worker)):
                folder = self.folder / f"{files.key}-{number}"
                folder.mkdir(mode=0o700, exist_ok=True)
                handle = _lock(folder)
                if handle is None:
                    continue
                try:
                    return CachedFolder(self, folder, files, handle)
                except BaseException:
                    os.close(handle)
                    raise
        raise ValueError(f"{_MOST_FOLDERS} runs use this model in {self.folder}: wait until one of them ends")


class CachedFolder:
    """A folder that this process has locked."""

    def __init__(self, cache: ModelCache, folder: Path, files: FolderFiles, handle: int) -> None:
        self.cache, self.folder, self.files, self._lock = cache, folder, files, handle
        empty = {
            name: torch.empty(shape, dtype=dtype_named(dtype), device="meta")
            for name, (shape, dtype) in files.tensors.items()
        }
        self._layout = TensorFile(empty, {"format": "pt"})
        # A flag for each block of a tensor: 1 if it is in the file.
        self.present = {name: bytearray(block_count(spec_bytes(spec))) for name, spec in files.tensors.items()}
        self._data = -1
        for name, text in files.files.items():
            with replace_file(folder / name) as temporary:
                temporary.write_text(text)
        if files.tensors:
            self._open_data()

    def _open_data(self) -> None:
        """Open the weight file, and read which blocks it has; replace one of another layout, or without a list."""
        path, header = self.folder / self.files.weight_file, self._layout.header
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._data = os.open(path, flags, 0o600)
        is_same = os.fstat(self._data).st_size == self._layout.bytes
        if is_same and os.pread(self._data, len(header), 0) == header and self._read_blocks():
            return
        os.close(self._data)
        path.unlink()  # a new file: the old one may be mapped
        self._data = os.open(path, flags | os.O_EXCL, 0o600)
        os.truncate(self._data, self._layout.bytes)
        write_all(self._data, memoryview(header), 0)

    def _read_blocks(self) -> bool:
        try:
            found = read_json(self.folder / _BLOCKS, "a list of blocks").items()
            listed = {name: bytearray(map("01".index, flags)) for name, flags in found}
        except (ValueError, TypeError, AttributeError):  # damaged, or not written before a crash
            return False
        if any(len(flags) != len(self.present.get(name, b"")) for name, flags in listed.items()):
            return False
        self.present |= listed
        return True

    def read(self, name: str, block: int) -> bytes:
        start, count = self._place(name, block)
        return os.pread(self._data, count, start)

    def write(self, name: str, block: int, content: memoryview) -> None:
        """Write a block whose hash has been compared."""
        start, count = self._place(name, block)
        assert len(content) == count
        with self.cache.errors_named():
            write_all(self._data, content, start)
        self.present[name][block] = 1

    def save(self) -> None:
        """Sync the blocks, and then their list: what it names is there after a crash."""
        with self.cache.errors_named():
            os.fdatasync(self._data)
            text = json.dumps({name: "".join(map(str, flags)) for name, flags in self.present.items() if any(flags)})
            with replace_file(self.folder / _BLOCKS) as temporary:
                temporary.write_text(text)

    def _place(self, name: str, block: int) -> tuple[int, int]:
        size = spec_bytes(self.files.tensors[name])
        return self._layout.offset(name) + block * BLOCK, min(BLOCK, size - block * BLOCK)

    def close(self) -> None:
        if self._data >= 0:
            os.close(self._data)
        os.close(self._lock)


def block_count(size: int) -> int:
    return -(-size // BLOCK)


def write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def _lock(folder: Path) -> int | None:
    """Lock a folder of the cache, and note its use; return the handle, None if another run has it."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(folder / _LOCK)):
            os.utime(handle)
            return handle
    except (BlockingIOError, FileNotFoundError):  # in use; removed meanwhile
        pass
    os.close(handle)
    return None


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _last_use(folder: Path) -> float:
    with suppress(OSError):
        return (folder / _LOCK).stat().st_mtime
    return 0.0


def _disk_bytes(path: Path) -> int:
    """Return the disk space of a file, or of the files of a folder; 0 if it was removed meanwhile."""
    found = 0
    with suppress(OSError):
        for each in (path, *(path.iterdir() if _is_folder(path) else ())):
            found += each.lstat().st_blocks * 512
    return found
