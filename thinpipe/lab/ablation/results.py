"""Results of ablation runs: a JSON line per run, appended as runs end, and statistics over seeds per method.

Results in the file survive an interruption. A row has mean, standard deviation and worst seed of the metric.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from thinpipe.lab.ablation.plan import Run, identity
from thinpipe.lab.records.record import Column, Record, Row, column, columns_of, is_number_format, row_of
from thinpipe.options import OptionError
from thinpipe.system.files import read_bytes

FORMAT = 1  # incremented when a reader of the old lines would misread the new ones
KIND = "ablate"
_ROW = "figures"  # the name of ``Result.row`` in the file, as in version 0.2

KEYS = (Column(name="task", heading="task", key=True), Column(name="codec", heading="codec", key=True))


@dataclass(frozen=True, kw_only=True)
class Against:
    """Differences between a method and the uncompressed one, over the seeds that both have."""

    minus_none: float | None = column("minus\nnone", format="+.4f", default=None)
    p_value: float | None = column("p", format=".2f", default=None)
    loss_added: float | None = column("loss\nadded", format="+.4f", better="lower", default=None)  # validation, nats
    loss_added_std: float | None = column("std", format=".4f", default=None)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Means over the seeds that finished, with the number of seeds, of finished and of failed ones."""

    wire_ratio: float | None = column("wire\nratio", format=".3f", better="lower", default=None)
    bits_per_value: float | None = column("bits per\nvalue", format=".2f", default=None)
    samples_per_s: float | None = column("samples/s", format=".0f", better="higher", default=None)
    wire_mb_per_step: float | None = column("wire\nMB/step", format=".3f", better="lower", default=None)
    # Sums over all workers and links; None for results from before they were recorded, and without links.
    encode_ms_per_step: float | None = column("encode\nms/step", format=".2f", better="lower", default=None)
    decode_ms_per_step: float | None = column("decode\nms/step", format=".2f", better="lower", default=None)
    seconds: float | None = column("seconds", format=".0f", better="lower", default=None)
    seeds: int = column("seeds", format="d")
    seeds_done: int = column("done", format="d", better="higher")
    seeds_failed: int = column("failed", format="d", better="lower")


COLUMNS = {column.name: column for kind in (Against, Costs) for column in columns_of(kind)}


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a run: its metrics, or the error that it ended with."""

    name: str
    settings: Mapping[str, Any]  # of the Run
    finished: str  # date and time
    wall_s: float  # wall time of the process, startup included
    threads: int  # per worker
    jobs: int  # number of concurrent runs
    row: Mapping[str, Any] | None = None  # the row of the run's record; None if it failed
    metric: str = ""  # name of row["metric"]
    metric_format: str = ""
    metric_better: Literal["higher", "lower"] = "higher"  # the default is for results from before there was a choice
    environment: Mapping[str, Any] | None = None
    thinpipe: str = ""
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.row is None

    @property
    def outcome(self) -> str:
        """The metric and the wall time, or the error, as text."""
        if self.row is None:
            return f"failed: {self.error}"
        return f"{self.metric} {format(self.row['metric'], self.metric_format)}, {self.wall_s:.0f} s"


class Store:
    """The result file, read once and then appended to; results whose settings are in no plan are left untouched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0  # incomplete lines: the process was killed while writing them
        self._by_identity: dict[str, Result] = {}
        for result in self._read():
            self._by_identity[identity(result.settings)] = result  # a later one is a retry

    def get(self, run: Run) -> Result | None:
        return self._by_identity.get(run.identity)

    def others(self, runs: Sequence[Run]) -> int:
        """Return the number of results that belong to none of these runs."""
        return len(self._by_identity.keys() - {run.identity for run in runs})

    def append(self, result: Result) -> None:
        """Append a result in one write; it is on disk when this returns."""
        facts = {name if name != "row" else _ROW: value for name, value in asdict(result).items()}
        line = json.dumps({"format": FORMAT, **facts}).encode() + b"\n"
        with self.path.open("ab+", buffering=0) as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line  # after a torn line
            file.write(line)
            os.fsync(file.fileno())
        self._by_identity[identity(result.settings)] = result

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an exclusive lock on the file; raise ValueError if another ablation is appending to it."""
        try:
            file = self.path.open("ab")
        except OSError as error:
            raise ValueError(f"{self.path}: results cannot be written there: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(
                    f"{self.path}: another ablation is adding results; wait for it, or name other"
                ) from None
            yield

    def _read(self) -> Iterator[Result]:
        if not os.path.lexists(self.path):
            return
        for number, line in enumerate(read_bytes(self.path, "results").splitlines(), 1):
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
    """Return the result that a line holds; None if it is not a result."""
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT or not isinstance(data.get("settings"), dict):
        return None
    try:
        result = Result(row=data.pop(_ROW, None), **data)
    except TypeError:  # a field is missing or misnamed
        return None
    has_metrics = result.row is None or isinstance(result.row, dict)
    return result if has_metrics and is_number_format(result.metric_format) else None


@dataclass(frozen=True)
class Method:
    """Runs that differ only in their seed, and their results so far."""

    runs: tuple[Run, ...]
    results: tuple[Result, ...]

    @property
    def done(self) -> list[Result]:
        return [result for result in self.results if not result.failed]

    def by_seed(self, name: str) -> dict[int, float]:
        """Return a metric by seed, of the runs that finished."""
        return {result.settings["seed"]: result.row[name] for result in self.done if result.row}

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.failed]


def methods(runs: Sequence[Run], store: Store) -> list[Method]:
    """Return the methods in the order of the plan, without those that have no result yet."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_without_seed(run.settings), []).append(run)
    found = []
    for group in groups.values():
        results = tuple(result for run in group if (result := store.get(run)) is not None)
        if results:
            found.append(Method(tuple(group), results))
    return found


def rows_of(found: Sequence[Method]) -> list[dict[str, Any]]:
    """Return a row per method; with an uncompressed method, include the difference to it and its p-value."""
    plain = {_without_seed_and_codec(method): method for method in found if method.runs[0].codec == "none"}
    against = (_against(method, plain.get(_without_seed_and_codec(method))) for method in found)
    return [method_row(method) | row_of(each) for method, each in zip(found, against, strict=True)]


def _against(method: Method, plain: Method | None) -> Against:
    if plain is None or plain is method:
        return Against()
    theirs = plain.by_seed("metric")
    ours = {seed: metric for seed, metric in method.by_seed("metric").items() if seed in theirs}
    if not ours:
        return Against()
    paired = [theirs[seed] for seed in ours]
    losses, plain_losses = method.by_seed("validation_loss"), plain.by_seed("validation_loss")
    added = [losses[seed] - plain_losses[seed] for seed in ours]
    return Against(
        minus_none=mean(ours.values()) - mean(paired),
        p_value=p_value(list(ours.values()), paired),
        loss_added=mean(added),
        loss_added_std=stdev(added) if len(added) > 1 else None,
    )


def p_value(metrics: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Return the p-value of a paired t-test of the mean difference; None for fewer than two pairs.

    Both sequences have the seeds in the same order.
    """
    differences = [ours - theirs for ours, theirs in zip(metrics, baseline, strict=True)]
    if len(differences) < 2:
        return None
    if max(differences) == min(differences):  # no spread: the test would divide by zero
        return 1.0 if mean(differences) == 0 else 0.0
    from scipy.stats import ttest_1samp  # imported here: it takes half a second

    return float(ttest_1samp(differences, 0.0).pvalue)


def method_row(method: Method) -> dict[str, Any]:
    """Return the keys, costs and metric of a method."""
    run = method.runs[0]
    varied = {_column_name(name): value for name, value in run.varied.items()}
    row = {"task": run.settings["task"], "codec": run.codec, **varied, **row_of(_costs(method))}
    return row | _metric_values(method.done) if method.done else row


def _costs(method: Method) -> Costs:
    done = method.done
    ratio, wire_bytes = _mean(done, "wire_ratio"), _mean(done, "wire_bytes_per_step")
    means = ("samples_per_s", "encode_ms_per_step", "decode_ms_per_step", "seconds")
    return Costs(
        wire_ratio=ratio,
        bits_per_value=None if ratio is None else 32 * ratio,
        wire_mb_per_step=None if wire_bytes is None else wire_bytes / 1e6,
        **{name: _mean(done, name) for name in means},
        seeds=len(method.runs),
        seeds_done=len(done),
        seeds_failed=len(method.failed),
    )


def _metric_values(done: Sequence[Result]) -> dict[str, Any]:
    """Return the values of the columns of ``metric_columns``."""
    metrics = [result.row["metric"] for result in done if result.row]
    worst, best = (min, max) if done[0].metric_better == "higher" else (max, min)
    spread = stdev(metrics) if len(metrics) > 1 else None
    names = (column.name for column in metric_columns(done[0]))
    return dict(zip(names, (mean(metrics), spread, worst(metrics), best(metrics)), strict=True))


def to_record(found: Sequence[Method], config: Mapping[str, Any]) -> Record:
    """Return the record of all methods, with the environment of the newest result, which may be another machine."""
    done = [result for method in found for result in method.done]
    metrics = {result.metric: result for result in done}
    varied = dict.fromkeys(name for method in found for name in method.runs[0].varied)
    columns = (
        *KEYS,
        *varied_columns(varied),
        *(column for result in metrics.values() for column in metric_columns(result)),
        *COLUMNS.values(),
    )
    rows: tuple[Row, ...] = tuple(rows_of(found))
    if not done:
        return Record(kind=KIND, config=config, columns=columns, rows=rows)
    newest = max(done, key=lambda result: result.finished)
    assert newest.environment is not None
    where = {**newest.environment, "threads": newest.threads, "jobs": newest.jobs}
    return Record(kind=KIND, config=config, columns=columns, rows=rows, environment=where, thinpipe=newest.thinpipe)


def varied_columns(options: Iterable[str]) -> tuple[Column, ...]:
    return tuple(Column(name=_column_name(name), heading=name, key=True) for name in options)


def metric_columns(result: Result) -> tuple[Column, ...]:
    """Return the columns that all results with this metric have."""
    metric, form, better = result.metric, result.metric_format, result.metric_better
    return (
        Column(name=f"{metric}_mean", heading=metric, format=form, better=better),
        Column(name=f"{metric}_std", heading="std", format=form),
        Column(name=f"{metric}_worst", heading="worst\nseed", format=form, better=better),
        Column(name=f"{metric}_best", heading="best\nseed", format=form, better=better),
    )


def _without_seed_and_codec(method: Method) -> str:
    settings = method.runs[0].settings
    return _without_seed({name: value for name, value in settings.items() if not name.startswith("compress_")})


def places(found: Sequence[Method]) -> Counter[str]:
    """Return the number of results by machine and version, so that mixed sources are shown."""
    return Counter(
        f"thinpipe {result.thinpipe}, torch {result.environment['torch']}, {result.environment['cpu']}, "
        f"{result.environment['cores']} cores, {result.jobs} jobs, {result.threads} threads"
        for method in found
        for result in method.done
        if result.environment is not None
    )


def _mean(done: Sequence[Result], name: str) -> float | None:
    values = [result.row[name] for result in done if result.row and result.row.get(name) is not None]
    return math.fsum(values) / len(values) if values else None


def _without_seed(settings: Mapping[str, Any]) -> str:
    return repr(sorted((name, repr(value)) for name, value in settings.items() if name != "seed"))


def _column_name(option: str) -> str:
    return option.replace("-", "_")
