"""Writing a checkpoint: a collective, after which all workers have either its path or the same error.

1  the client makes a fresh .partial folder
2  every worker writes its part, synced to disk; or sends it to the client, which writes it (``save_local``)
3  all workers exchange name, size and hash, or their error
4  the client checks that every part is there with its size, writes the manifest, renames the folder
5  the client deletes older checkpoints, and sends the result

A disk error does not end the run: the folder is removed, and the next save tries again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from thinpipe.system.files import sync
from thinpipe.train.checkpoints.best import mark_best
from thinpipe.train.checkpoints.folder import (
    PARTIAL,
    checkpoint_path,
    checkpoints,
    delete,
    is_complete,
    keep_companions,
)
from thinpipe.train.checkpoints.manifest import Manifest, Progress, SaveOptions
from thinpipe.train.checkpoints.part import Part, PartStream, part_name, write_pieces
from thinpipe.train.engines.world import World
from thinpipe.train.settings import Settings

_SLACK = 64 << 20  # bytes that a part may exceed twice its size by, as estimated before the first step


class UnsavedError(RuntimeError):
    """The last checkpoint or the export of a finished run could not be written."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The result of a save: the path of a checkpoint, or the reason why there is none."""

    path: Path
    problem: str | None = None


class Saver:
    """The writer of the checkpoints of one run; the same on every worker."""

    def __init__(
        self,
        directory: Path,
        world: World,
        *,
        settings: Settings,
        options: SaveOptions,
        first_units: tuple[int, ...],
        data: Mapping[str, Any],
        expected_bytes: list[int],  # estimate for each worker's part
        companions: Mapping[str, bytes],  # of the client's data
    ) -> None:
        self.directory, self.world = directory, world
        self.settings, self.options, self.first_units, self.data = settings, options, first_units, data
        self.expected_bytes, self.companions = expected_bytes, companions

    def save(self, progress: Progress, state: dict[str, Tensor], *, is_best: bool = False) -> Saved:
        """Write a checkpoint, or return why there is none. A collective; all workers return the same.

        ``is_best``: it has the best validation metric of the run so far.
        """
        path = checkpoint_path(self.directory, progress.step)
        before = self._best_before(progress)
        progress.best = (progress.step, progress.metric) if is_best else before
        partial = path.with_name(path.name + PARTIAL)
        problems = self._on_client(lambda: _make_fresh(partial))
        if not problems:
            parts, problems = (self._collect if self.options.save_local else self._write)(partial, state)
        if not problems:
            problems = self._on_client(lambda: self._complete(path, partial, progress, parts))
        if problems and self.world.is_client:
            shutil.rmtree(partial, ignore_errors=True)
        if problems:
            progress.best = before
        return Saved(path=path, problem=problems[0] if problems else None)

    def _best_before(self, progress: Progress) -> tuple[int, float] | None:
        """Return the best checkpoint so far, if it is in this folder: a resumed run may save elsewhere."""
        best = progress.best
        return best if best is not None and is_complete(checkpoint_path(self.directory, best[0])) else None

    def _on_client(self, function: Callable[[], None]) -> list[str]:
        """Call a function on the client; return its disk error on all workers, as a list of at most one line."""
        problem = None
        if self.world.is_client:
            try:
                function()
            except OSError as error:
                problem = self._line(error)
        return _errors(self.world.gather(problem))

    def _write(self, partial: Path, state: dict[str, Tensor]) -> tuple[list[Part], list[str]]:
        part, problem = None, None
        try:
            part = asdict(write_pieces(partial / part_name(self.world.worker), PartStream(state).pieces()))
        except OSError as error:
            problem = self._line(error)
        results = self.world.gather([part, problem])
        problems = _errors([problem for _, problem in results])
        return [] if problems else [Part(**part) for part, _ in results], problems

    def _collect(self, partial: Path, state: dict[str, Tensor]) -> tuple[list[Part], list[str]]:
        """Like ``_write``, but the client writes all files."""
        world, stream = self.world, PartStream(state)
        sizes = world.gather(stream.bytes)
        problems = [
            f"worker {worker} would send {size} bytes, and about {expected} were expected"
            for worker, (size, expected) in enumerate(zip(sizes, self.expected_bytes, strict=True))
            if size > 2 * expected + _SLACK
        ]
        if problems:
            return [], problems
        if not world.is_client:
            return self._compare([], world.control.send_pieces(stream.pieces(), 0), None)
        files, problem = [], None
        for worker, size in enumerate(sizes):
            pieces = stream.pieces() if worker == 0 else world.control.receive_pieces(size, worker)
            try:
                files.append(write_pieces(partial / part_name(worker), pieces))
            except OSError as error:
                problem = problem or self._line(error)
                for _ in pieces:  # drain: the worker keeps sending after an error
                    pass
        return self._compare(files, None, problem)

    def _compare(self, files: list[Part], sent: str | None, problem: str | None) -> tuple[list[Part], list[str]]:
        """Return the parts that the client has written, and a problem for each that differs from what was sent."""
        (written, _, problem), *senders = self.world.gather([[file.xxh3_128 for file in files], sent, problem])
        if problem is not None:
            return [], [problem]
        changed = [worker for worker, (_, sent, _) in enumerate(senders, start=1) if sent != written[worker]]
        return files, [f"the part of worker {worker} was changed on its way to the client" for worker in changed]

    def _complete(self, path: Path, partial: Path, progress: Progress, parts: list[Part]) -> None:
        for worker, part in enumerate(parts):
            size = (partial / part.name).stat().st_size
            if size != part.bytes:
                raise OSError(0, f"worker {worker} wrote {part.bytes} bytes, the client sees {size}", part.name)
        keep_companions(self.directory, self.companions)
        Manifest(
            settings=self.settings,
            options=self.options,
            progress=progress,
            first_units=self.first_units,
            data=self.data,
            parts=tuple(parts),
        ).write(partial)
        sync(partial)
        if path.exists():  # from before the run was resumed from an older one
            delete(path)
        partial.rename(path)
        sync(self.directory)
        best = None if progress.best is None else checkpoint_path(self.directory, progress.best[0])
        mark_best(self.directory, None if best is None else best.name)
        found = checkpoints(self.directory)
        here = found.index(path)
        # Later ones exist if the run was resumed from before them: it will save these steps again.
        for other in found[: max(here + 1 - self.options.keep, 0)] + found[here + 1 :]:
            if other != best:
                with suppress(OSError):  # the new checkpoint is saved, and the next save retries
                    delete(other)

    def _line(self, error: OSError) -> str:
        where = self.directory if error.filename is None else error.filename
        return f"worker {self.world.worker}: {where}: {error.strerror or error}"


def _make_fresh(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _errors(problems: list[str | None]) -> list[str]:
    return [problem for problem in problems if problem is not None]
