"""The result of an evaluation as columns of a record and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from thinpipe.lab.records import report
from thinpipe.lab.records.record import column, columns_of, row_of
from thinpipe.train.evaluation import EvaluationResult
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import METRICS
from thinpipe.train.tasks.tasks import task as find_task


@dataclass(frozen=True, kw_only=True)
class EvaluationColumns:
    """One evaluation. The codec is not a key, so that evaluations of different codecs can be compared."""

    task: str = column("task", key=True)
    part: str = column("part", key=True)
    samples: int = column("samples", format=",d")
    loss: float = column("loss\nnats", format=".4f", better="lower")
    perplexity: float | None = column("perplexity", format=METRICS["perplexity"].format, better="lower")
    bits_per_byte: float | None = column("bits/\nbyte", format=".3f", better="lower")
    accuracy: float = column("accuracy", format=METRICS["accuracy"].format, better="higher")
    matthews: float | None = column("matthews", format=METRICS["matthews"].format, better="higher")
    samples_per_s: float = column("samples/s", format=".1f", better="higher")
    forward: str | None = column("codec")
    wire_bytes: int | None = column("wire\nbytes", format=",d", better="lower")

    @staticmethod
    def of(settings: Settings, part: str, result: EvaluationResult) -> EvaluationColumns:
        found, metric = result.found, find_task(settings.task).metric
        is_pipeline = settings.parallel == "pipeline"
        return EvaluationColumns(
            task=settings.task,
            part=part,
            samples=result.samples,
            loss=found.loss,
            perplexity=found.metric if metric == "perplexity" else None,
            bits_per_byte=found.bits_per_byte,
            accuracy=found.accuracy,
            matthews=found.metric if metric == "matthews" else None,
            samples_per_s=result.samples / max(result.seconds, 1e-9),
            forward=settings.compress_forward if is_pipeline else None,
            wire_bytes=result.wire_bytes if is_pipeline else None,
        )


def show(row: EvaluationColumns) -> None:
    """Print the table of an evaluation."""
    report.show([report.Table(title="Evaluation", columns=columns_of(EvaluationColumns), rows=[row_of(row)])])
