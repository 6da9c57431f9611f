"""Results of runs, a line of JSON each, appended as runs end: what is in the file is done, whatever happens next."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from thinpipe.ablation.plan import Run, identity
from thinpipe.measure.files import check_regular, errors_named
from thinpipe.options import OptionError, named

FORMAT = 1  # raised when a reader of the old lines would misread the new ones


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a run: figures, or the error that it ended with."""

    name: str
    settings: Mapping[str, Any]  # of the Run
    finished: str  # date and time
    wall_s: float  # of the process, its start included
    threads: int  # of each worker
    jobs: int  # runs at a time
    figures: Mapping[str, Any] | None = None  # the row of the run's record; None: it failed
    metric: str = ""  # what figures["metric"] is
    metric_format: str = ""
    metric_better: Literal["higher", "lower"] = "higher"  # as of results from before there was a choice
    environment: Mapping[str, Any] | None = None
    thinpipe: str = ""
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.figures is None


class Store:
    """The file. Read once, then appended to; results of settings that no plan has any more stay in it untouched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0  # lines that are not whole: somebody was ended while writing one
        self._by_identity: dict[str, Result] = {}
        for result in self._read():
            self._by_identity[identity(result.settings)] = result  # a later one is a run tried again

    def __len__(self) -> int:
        return len(self._by_identity)

    def get(self, run: Run) -> Result | None:
        return self._by_identity.get(run.identity)

    def others(self, runs: Sequence[Run]) -> int:
        """How many results are of none of these runs."""
        return len(self._by_identity.keys() - {run.identity for run in runs})

    def append(self, result: Result) -> None:
        """On disk, in one piece, when this returns."""
        line = json.dumps({"format": FORMAT, **asdict(result)}).encode() + b"\n"
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            os.write(file, b"\n" + line if torn else line)
            os.fsync(file)
        finally:
            os.close(file)
        self._by_identity[identity(result.settings)] = result

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For one ablation at a time: ValueError if another is appending to this file."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(f"{self.path}: results cannot be written there: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise ValueError(f"{self.path}: another ablation is adding results; wait for it, or name other") from None
        try:
            yield
        finally:
            os.close(file)

    def _read(self) -> Iterator[Result]:
        if not os.path.lexists(self.path):
            return
        check_regular(self.path, "results")
        with errors_named(self.path, "results", named("name others with {results}")):
            lines = self.path.read_bytes().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                self.damaged += 1
                continue
            result = _result(data)
            if result is None:
                raise OptionError(
                    f"{self.path}, line {number} is no result of an ablation in format {FORMAT}; name another file "
                    "with {results}"
                )
            yield result


def _result(data: Any) -> Result | None:
    """The result that a line holds, if it is one."""
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT or not isinstance(data.get("settings"), dict):
        return None
    try:
        result = Result(**data)
    except TypeError:  # a field is missing or misnamed
        return None
    return result if result.figures is None or isinstance(result.figures, dict) else None
