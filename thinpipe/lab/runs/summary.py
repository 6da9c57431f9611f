"""The record of a training run: one row of results and costs, with its epochs, links and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from thinpipe.lab.records.record import Column, Record, column, columns_of, row_of
from thinpipe.lab.records.step_times import StepTimes, step_times
from thinpipe.train.events import ChosenBits, Epoch, Finished, Listener, Plan, Step, WorkerUse
from thinpipe.train.tasks.task import METRICS

KIND = "train"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The results that the terminal shows. Codec and seed are not keys, so that runs can be compared across them."""

    task: str = column("task", key=True)
    metric: float = column("metric")
    best_metric: float = column("best")
    bits_per_byte: float | None = column("bits/\nbyte", format=".3f", better="lower")  # of texts
    validation_loss: float = column("validation\nloss", format=".4f", better="lower")
    train_loss: float = column("train\nloss", format=".4f", better="lower")
    samples_per_s: float = column("samples/s", format=".0f", better="higher")
    tokens_per_s: float | None = column("tokens/s", format=".0f", better="higher")  # of texts, padding included
    seconds: float = column("seconds", format=".1f", better="lower")
    wire_bytes_per_step: float | None = column("wire\nbytes/step", format=",.0f", better="lower")


@dataclass(frozen=True, kw_only=True)
class RunColumns:
    """All columns of the record. Times per step are sums over workers and links; memory is the largest worker's."""

    result: RunResult
    parallel: str = column("parallel")
    schedule: str | None = column("schedule")
    forward: str = column("forward")
    backward: str = column("backward")
    seed: int = column("seed", format="d")
    steps: int = column("steps", format="d")
    parameters: int = column("parameters", format=",d")
    tensor_bytes_per_step: float | None = column("tensor\nbytes/step", format=".0f")
    wire_mb_per_epoch: float | None = column("wire\nMB/epoch", format=".1f", better="lower")
    wire_ratio: float | None = column("wire\nratio", format=".3f", better="lower")
    parameters_sha256: str | None = column("parameters\nsha256")
    peak_mib: float | None = column("peak\nMiB", format=".0f", better="lower")
    compute_ms_per_step: float = column("computing\nms/step", format=".2f", better="lower")
    encode_ms_per_step: float | None = column("encoding\nms/step", format=".2f", better="lower")
    wait_ms_per_step: float | None = column("waiting\nms/step", format=".2f", better="lower")
    transfer_ms_per_step: float | None = column("transfer\nms/step", format=".2f", better="lower")
    decode_ms_per_step: float | None = column("decoding\nms/step", format=".2f", better="lower")
    predicted_samples_per_s: float | None = column("predicted\nsamples/s", format=".0f", default=None)  # by a plan
    metric_name: str
    first_step: int
    epochs: Sequence[Mapping[str, Any]]
    links: Sequence[Mapping[str, Any]]
    workers: Sequence[Mapping[str, Any]]
    bits: Sequence[Mapping[str, Any]]  # of links where they are chosen in training: from which step on


def columns(values: RunResult | RunColumns, plan: Plan) -> tuple[Column, ...]:
    """Return the columns with a value: `thinpipe diff` would take a column of None for a missing metric."""
    facts = asdict(METRICS[plan.metric])
    own: dict[str, dict[str, Any]] = {"metric": {"heading": plan.metric, **facts}, "best_metric": facts}
    row = row_of(values)
    return tuple(
        replace(column, **own.get(column.name, {}))
        for column in columns_of(type(values))
        if row[column.name] is not None
    )


def make_result(plan: Plan, end: Finished, *, wire_bytes: int) -> RunResult:
    """Return the results; ``wire_bytes`` is the sum over all workers and steps."""
    same = {each.name: getattr(end, each.name) for each in fields(RunResult) if hasattr(end, each.name)}
    return RunResult(
        **same,
        task=plan.task,
        tokens_per_s=None if plan.tokens is None else end.samples_per_s * plan.tokens,
        wire_bytes_per_step=None if plan.parallel == "none" else wire_bytes / max(end.steps, 1),
    )


def run_step_times(end: Finished, worker: WorkerUse | None = None) -> StepTimes:
    """Return the times of a step on one worker, or their sums over all."""
    steps = max(end.steps, 1)
    compute_ms = sum(each.compute_ms for each in end.workers) if worker is None else worker.compute_ms
    if not end.links:
        return StepTimes(compute_ms=compute_ms / steps)
    stages = None if worker is None else worker.stages
    sent = [link for link in end.links if stages is None or link.source in stages]
    received = [link for link in end.links if stages is None or link.target in stages]
    return step_times(compute_ms / steps, sent, received, steps)


class RecordFile(Listener):
    """Writes the record atomically when the run has finished, or prints it on stdout if the disk fails.

    A run that fails or is interrupted writes none.
    """

    def __init__(self, path: Path, *, config: Mapping[str, Any], forward: str, backward: str, seed: int) -> None:
        self.path = path
        self.config = {name: value for name, value in config.items() if value is not None}  # options that were given
        self.settings: dict[str, Any] = {"forward": forward, "backward": backward, "seed": seed}
        self.wire_bytes = 0
        self.epochs: list[dict[str, Any]] = []
        self.bits: list[dict[str, Any]] = []

    def planned(self, plan: Plan) -> None:
        self.plan = plan

    def stepped(self, step: Step) -> None:
        self.wire_bytes += step.wire_bytes

    def evaluated(self, epoch: Epoch) -> None:
        self.epochs.append(asdict(epoch))

    def bits_chosen(self, chosen: ChosenBits) -> None:
        before = [each for each in self.bits if each["step"] < chosen.step]  # later ones are computed again
        self.bits = [*before, asdict(chosen)]

    def finished(self, end: Finished) -> None:
        row = self._row(end)
        table = columns(row, self.plan)
        Record(kind=KIND, config=self.config, columns=table, rows=(row_of(row),)).write_or_print(self.path)

    def _row(self, end: Finished) -> RunColumns:
        tensor_bytes = sum(link.tensor_bytes for link in end.links)
        result = make_result(self.plan, end, wire_bytes=self.wire_bytes)
        step_bytes = result.wire_bytes_per_step
        return RunColumns(
            result=result,
            parallel=self.plan.parallel,
            schedule=self.plan.schedule,
            **self.settings,
            steps=end.steps,
            parameters=self.plan.parameters,
            tensor_bytes_per_step=tensor_bytes / max(end.steps, 1) if end.links else None,
            wire_mb_per_epoch=None if step_bytes is None else step_bytes * self.plan.steps_per_epoch / 1e6,
            wire_ratio=sum(link.wire_bytes for link in end.links) / tensor_bytes if tensor_bytes else None,
            parameters_sha256=end.parameters_sha256 or None,
            peak_mib=max((worker.peak_mib for worker in end.workers), default=None),
            **{f"{name}_per_step": value for name, value in asdict(run_step_times(end)).items()},
            predicted_samples_per_s=self.config.get("predicted_samples_per_s"),
            metric_name=self.plan.metric,
            first_step=self.plan.first_step,
            epochs=self.epochs,
            links=[asdict(link) | {"spec": self.settings[link.direction]} for link in end.links],
            workers=[asdict(worker) for worker in end.workers],
            bits=self.bits,
        )
