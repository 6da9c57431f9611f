"""The folder that checkpoints go to: one run's at a time, cleared of what broken runs left, seen by all workers."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from thinpipe.engines.world import World
from thinpipe.options import OptionError
from thinpipe.training.checkpoint import PARTIAL, checkpoints

LOCK = ".lock"
_WORD = ".word-"
# What file systems answer that know no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


class FolderLock:
    """A run's hold on its folder. The kernel lets go of it when the process ends, however it ends."""

    def __init__(self, directory: Path) -> None:
        """ValueError if another run has the folder, or if nothing can be written there."""
        self._path = directory / LOCK
        self.notice: str | None = None  # what the user should know
        self._made = not directory.exists()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._handle = self._take(directory)
        except OSError as error:
            raise OptionError(f"{{save}} needs a folder that can be written; {directory}: {error.strerror}") from None

    def _take(self, directory: Path) -> int:
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(handle, 200).decode(errors="replace").strip()
                os.close(handle)
                raise OptionError(
                    f"one run at a time saves in a folder, and {directory} is in use{holder and f' by {holder}'}; "
                    "wait for that run, end it, or name another folder with {save}"
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(handle)
                    raise
                self.notice = (
                    f"{directory} cannot be locked ({error.strerror}): see to it that no other run saves there"
                )
                return handle
            if self._is_still_there(handle):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return handle
            os.close(handle)  # of a run that has just ended and taken the file away

    @property
    def is_held(self) -> bool:
        return self.notice is None

    def release(self) -> None:
        # While it is held: whoever opened the file before finds out that it has gone, and makes another.
        self._path.unlink(missing_ok=True)
        os.close(self._handle)
        if self._made:
            with suppress(OSError):  # there are checkpoints in it, as there should be
                self._path.parent.rmdir()

    def _is_still_there(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self._path))
        except FileNotFoundError:
            return False


def sweep(directory: Path) -> None:
    """Remove what runs that were ended left half written. Only for who has the lock."""
    for left in directory.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
    for left in directory.glob(f"{_WORD}*"):
        left.unlink(missing_ok=True)


def check_unused(directory: Path) -> None:
    """ValueError if a new run would save among the checkpoints of another."""
    if checkpoints(directory):
        raise OptionError(
            f"{directory} holds checkpoints of another run: go on with that by {{resume}} {directory}, or name "
            "another folder"
        )


def check_shared(directory: Path, world: World) -> None:
    """ValueError on all workers if one does not see what the client writes into the folder. A collective."""
    word, problem = secrets.token_hex(16), None
    file = directory / f"{_WORD}{secrets.token_hex(8)}"  # a name that no file system remembers as missing
    if world.is_client:
        try:
            file.write_text(word)
        except OSError as error:
            problem = f"{{save}} needs a folder that can be written; {directory}: {error.strerror}"
    name, word, problem = world.gather([file.name, word, problem])[0]
    try:
        seen = (directory / name).read_text()
    except (OSError, UnicodeDecodeError):
        seen = None
    blind = [worker for worker, told in enumerate(world.gather(seen)) if told != word]
    if world.is_client:
        file.unlink(missing_ok=True)
    if problem is not None:
        raise OptionError(problem)
    if blind:
        raise OptionError(
            f"all workers save into one folder, and {_workers(blind)} not see what the client writes into {directory}: "
            "name a folder that all machines share, or give {save_local}, which keeps all checkpoints with the client"
        )


def _workers(who: list[int]) -> str:
    return f"worker {who[0]} does" if len(who) == 1 else f"workers {', '.join(map(str, who))} do"
