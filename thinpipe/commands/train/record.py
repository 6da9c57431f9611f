"""The record of a training run: one row of results, with its epochs, links and workers beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinpipe.commands.terminal import write_or_print
from thinpipe.measure.record import Column, Record
from thinpipe.training.events import Epoch, Finished, Plan, Step

KIND = "train"

_METRIC_FORMATS = {"accuracy": ".1%", "matthews": ".3f"}


def metric_text(name: str, value: float) -> str:
    """A metric as people read it."""
    return format(value, _METRIC_FORMATS[name])


def _result_columns(metric: str) -> tuple[Column, ...]:
    form = _METRIC_FORMATS[metric]
    return (
        # Runs are compared across codecs and seeds, so these are no keys: a comparison shows them as settings.
        Column(name="task", heading="task", key=True),
        Column(name="metric", heading=metric, format=form, better="higher"),
        Column(name="best_metric", heading="best", format=form, better="higher"),
        Column(name="validation_loss", heading="validation\nloss", format=".4f", better="lower"),
        Column(name="train_loss", heading="train\nloss", format=".4f", better="lower"),
        Column(name="samples_per_s", heading="samples/s", format=".0f", better="higher"),
        Column(name="seconds", heading="seconds", format=".1f", better="lower"),
        Column(name="wire_bytes_per_step", heading="wire\nbytes/step", format=",.0f", better="lower"),
    )


RESULT_COLUMNS = {metric: _result_columns(metric) for metric in _METRIC_FORMATS}  # what the terminal shows
_MORE_COLUMNS = (
    Column(name="parallel", heading="parallel"),
    Column(name="forward", heading="forward"),
    Column(name="backward", heading="backward"),
    Column(name="seed", heading="seed", format="d"),
    Column(name="steps", heading="steps", format="d"),
    Column(name="parameters", heading="parameters", format=",d"),
    Column(name="tensor_bytes_per_step", heading="tensor\nbytes/step", format=".0f"),
    Column(name="wire_ratio", heading="wire\nratio", format=".3f", better="lower"),
    Column(name="parameters_sha256", heading="parameters\nsha256"),
    Column(name="peak_mib", heading="peak\nMiB", format=".0f", better="lower"),
    *(
        Column(name=f"{part}_ms_per_step", heading=f"{heading}\nms/step", format=".2f", better="lower")
        for part, heading in (
            ("compute", "computing"),
            ("encode", "encoding"),
            ("wait", "waiting"),
            ("transfer", "transfer"),
            ("decode", "decoding"),
        )
    ),
)


def result_row(plan: Plan, end: Finished, *, wire_bytes: int) -> dict[str, Any]:
    """The figures of a run. Times per step are sums over workers and links; memory is that of the largest worker."""
    steps = max(end.steps, 1)
    tensor_bytes = sum(link.tensor_bytes for link in end.links)
    link_parts = {
        f"{part}_ms_per_step": sum(getattr(link, f"{part}_ms") for link in end.links) / steps if end.links else None
        for part in ("encode", "wait", "transfer", "decode")
    }
    return {
        "task": plan.task,
        "metric": end.metric,
        "best_metric": end.best_metric,
        "validation_loss": end.validation_loss,
        "train_loss": end.train_loss,
        "samples_per_s": end.samples_per_s,
        "seconds": end.seconds,
        "steps": end.steps,
        "parameters": plan.parameters,
        "wire_bytes_per_step": wire_bytes / steps if plan.parallel != "none" else None,
        "tensor_bytes_per_step": tensor_bytes / steps if end.links else None,
        "wire_ratio": sum(link.wire_bytes for link in end.links) / tensor_bytes if tensor_bytes else None,
        "peak_mib": max((worker.peak_mib for worker in end.workers), default=None),
        "compute_ms_per_step": sum(worker.compute_ms for worker in end.workers) / steps,
        **link_parts,
        "parameters_sha256": end.parameters_sha256 or None,
    }


class RecordFile:
    """Writes the record when the run has finished, whole, or to stdout where the disk does not take it.

    A run that fails or is broken off leaves none.
    """

    def __init__(self, path: Path, *, config: Mapping[str, Any], forward: str, backward: str, seed: int) -> None:
        self.path = path
        self.config = {name: value for name, value in config.items() if value is not None}  # not asked for, not said
        self.settings = {"forward": forward, "backward": backward, "seed": seed}
        self.wire_bytes = 0
        self.epochs: list[dict[str, Any]] = []

    def planned(self, plan: Plan) -> None:
        self.plan = plan

    def stepped(self, step: Step) -> None:
        self.wire_bytes += step.wire_bytes

    def evaluated(self, epoch: Epoch) -> None:
        self.epochs.append(asdict(epoch))

    def noticed(self, line: str) -> None:
        pass

    def saved(self, step: int, path: str) -> None:
        pass

    def save_failed(self, step: int, problem: str) -> None:
        pass

    def finished(self, end: Finished) -> None:
        row = result_row(self.plan, end, wire_bytes=self.wire_bytes)
        details = {"links": [asdict(link) for link in end.links], "workers": [asdict(each) for each in end.workers]}
        record = Record(
            kind=KIND,
            config=self.config,
            columns=(*RESULT_COLUMNS[self.plan.metric], *_MORE_COLUMNS),
            rows=(
                row
                | self.settings
                | {"parallel": self.plan.parallel, "metric_name": self.plan.metric}
                | {"first_step": self.plan.first_step, "epochs": self.epochs}
                | details,
            ),
        )
        write_or_print(record, self.path)

    def failed(self, error: BaseException) -> None:
        pass
