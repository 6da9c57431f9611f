"""The checkpoint folder of a run: locked by one run at a time, with checkpoints that are complete or absent.

DIR/.lock                     held by the client while a run saves here
DIR/step-00000120/            complete: a folder gets this name when all files are in it
  part-0.safetensors ...      each worker's tensors
  manifest.json               step, settings, progress, and the parts with their sizes and hashes
DIR/step-00000240.partial/    being written, being deleted, or left by an interrupted run
DIR/best                      link to one of them: best.py
DIR/tokenizer/                of a run that trained one, from its first checkpoint on: ``Data.companions``
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from torch import Tensor

from thinpipe.options import OptionError
from thinpipe.system.files import make_folder, read_folder, replace_file
from thinpipe.train.checkpoints.manifest import NAME, Manifest, read_manifest
from thinpipe.train.checkpoints.part import DamagedError, read_part, verify_part
from thinpipe.train.engines.world import World

PARTIAL = ".partial"
LOCK = ".lock"
COMPANIONS = "tokenizer"
_PROBE = ".word-"  # prefix of files that show whether all workers see the folder
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def is_complete(path: Path) -> bool:
    return path.suffix != PARTIAL and (path / NAME).is_file()


def checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    return sorted(path for path in directory.glob("step-*") if is_complete(path))


def candidates(path: Path) -> list[Path]:
    """Return the checkpoints a user may mean by a path: this one; or those in this folder, newest first.

    Includes those that have lost their manifest: a caller that uses an older one instead should report why.
    """
    if is_complete(path):
        return [path]
    if not checkpoints(path):
        raise OptionError(
            f"{{resume}} takes a folder that a run was saved in, or one checkpoint of it; {path} has no complete "
            "checkpoint. Start the run again without {resume}; if the client alone has it, give {save_local} too"
        )
    found = [each for each in path.glob("step-*") if each.is_dir() and re.fullmatch(r"step-\d{8,}", each.name)]
    return sorted(found, reverse=True)


def newest(path: Path) -> Path:
    """Return the checkpoint a user means: this one, or the newest with a manifest in this folder; not verified."""
    return next(each for each in candidates(path) if is_complete(each))


def newest_manifest(path: Path) -> tuple[Path, Manifest]:
    """Return the newest checkpoint with an undamaged manifest, and the manifest; raise ValueError if there is none."""
    found, manifest, _ = newest_undamaged(path, verify=False)
    return found, manifest


def newest_undamaged(path: Path, *, verify: bool = True) -> tuple[Path, Manifest, list[tuple[Path, str]]]:
    """Return the newest undamaged checkpoint, and the damage of later ones; raise ValueError if all are damaged.

    ``verify``: read the parts, too, and compare them with their hashes.
    """
    damages: list[tuple[Path, str]] = []
    for each in candidates(path):
        try:
            manifest = read_manifest(each)
            for part in manifest.parts if verify else ():
                verify_part(each, part)
            return each, manifest, damages
        except DamagedError as error:
            damages.append((each, str(error)))
    raise ValueError(all_damaged(path, damages))


def all_damaged(path: Path, damages: list[tuple[Path, str]]) -> str:
    """Return the error message for a path none of whose checkpoints can be read."""
    if damages and damages[0][0] == path:  # the user named this checkpoint
        others = [each.name for each in reversed(checkpoints(path.parent)) if each != path]
        advice = f"others in {path.parent}: {', '.join(others)}" if others else f"there is no other in {path.parent}"
        return f"{path} is damaged: {damages[0][1]}; {advice}"
    lines = [f"  {each.name}: {damage}" for each, damage in damages]
    return f"all checkpoints in {path} are damaged:\n" + "\n".join(lines)


def load(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the wanted tensors of a checkpoint, on the CPU; raise DamagedError if they differ from what was saved."""
    state: dict[str, Tensor] = {}
    for part in read_manifest(path).parts:
        state |= read_part(path, part, wanted)
    return state


def companions_of(path: Path) -> Path | None:
    """Return the folder of a run's companions, given its checkpoint folder or one checkpoint; None if it has none."""
    found = (path.parent if is_complete(path) else path) / COMPANIONS
    return found if found.is_dir() else None


def keep_companions(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files to the folder of a run, replacing each atomically; then remove others, of an earlier run."""
    kept = directory / COMPANIONS
    if not files or (kept.is_dir() and read_folder(kept) == files):
        return
    for name, content in files.items():
        make_folder((kept / name).parent)
        with replace_file(kept / name) as temporary:
            temporary.write_bytes(content)
    for other in kept.rglob("*"):
        if other.is_file() and str(other.relative_to(kept)) not in files:
            other.unlink()


def delete(path: Path) -> None:
    """Delete a checkpoint; rename it first, since an incomplete one must never look complete."""
    partial = path.with_name(f"{path.name}.old{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


class FolderLock:
    """A run's lock on its folder. The kernel releases it when the process ends, even by a crash."""

    def __init__(self, directory: Path) -> None:
        """Take the lock; raise ValueError if another run has it, or if the folder is not writable."""
        self._path = directory / LOCK
        self.notice: str | None = None  # a line for the user if the folder cannot be locked
        self._made = not directory.exists()
        try:
            make_folder(directory)
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
            os.close(handle)  # of a run that has just ended and deleted the file

    @property
    def is_held(self) -> bool:
        return self.notice is None

    def release(self) -> None:
        # While locked: a process that opened the file before finds that it is deleted, and creates another.
        self._path.unlink(missing_ok=True)
        os.close(self._handle)
        if self._made:
            with suppress(OSError):  # it contains checkpoints, as it should
                self._path.parent.rmdir()

    def _is_still_there(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self._path))
        except FileNotFoundError:
            return False


def sweep(directory: Path) -> None:
    """Remove incomplete files of interrupted runs. The caller must hold the lock."""
    for left in directory.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
    for left in directory.glob(f"{_PROBE}*"):
        left.unlink(missing_ok=True)


def check_exported(folder: str, option: Literal["model", "adapter"] = "model") -> None:
    """Raise OptionError if a folder that should contain a model, or adapters, contains a run's checkpoints."""
    if is_complete(Path(folder)) or checkpoints(Path(folder)):
        kind = "transformers" if option == "model" else "peft"
        raise OptionError(
            f"{{{option}}} is a folder of {kind}, and {folder} has checkpoints of a run: make one of them with "
            f"`thinpipe export {folder} DIR`"
        )


def check_save_folder(directory: Path, resume: Path | None) -> None:
    """Raise OptionError if saving in ``directory`` would replace checkpoints of another run, or newer ones of this."""
    is_one = resume is not None and is_complete(resume)
    origin = resume.parent if resume is not None and is_one else resume
    found = checkpoints(directory)
    if resume is not None and origin is not None and origin.resolve() == directory.resolve():
        newer = [each.name for each in found if is_one and each.name > resume.name]
        if newer:
            raise OptionError(
                f"{{resume}} names {resume.name}, and {directory} has newer checkpoints, which the run would replace: "
                f"{', '.join(newer)}. Continue from the newest with {{resume}} {directory}, name another folder with "
                "{save}, or delete them"
            )
    elif found:
        raise OptionError(
            f"{directory} holds checkpoints of another run: go on with that by {{resume}} {directory}, or name "
            "another folder"
        )


def check_shared(directory: Path, world: World) -> None:
    """Raise ValueError on all workers if one does not see what the client writes to the folder. A collective."""
    content, problem = secrets.token_hex(16), None
    file = directory / f"{_PROBE}{secrets.token_hex(8)}"  # a new name: file systems may cache missing names
    if world.is_client:
        try:
            file.write_text(content)
        except OSError as error:
            problem = f"{{save}} needs a folder that can be written; {directory}: {error.strerror}"
    name, content, problem = world.gather([file.name, content, problem])[0]
    try:
        seen = (directory / name).read_text()
    except (OSError, UnicodeDecodeError):
        seen = None
    blind = [worker for worker, read in enumerate(world.gather(seen)) if read != content]
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
