"""What the pipeline benchmark measures, checked before any worker starts: every error says the rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from thinpipe.bench.inputs import check_counts, check_launch, find_device
from thinpipe.bench.models import CUTTABLE, Shapes, least_bytes
from thinpipe.codecs.spec import codec
from thinpipe.measure.memory import check_fits
from thinpipe.pipeline.order import Order
from thinpipe.pipeline.partition import Layout

MOST_WIDTH = 1000
Parallel = Literal["none", "data", "pipeline"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train, measured for some steps."""

    parallel: Parallel
    layout: Layout | None = None  # this and what follows: of a pipeline
    schedule: Order | None = None
    chunks: int | None = None
    compress: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured and how; the same on every worker."""

    model: str
    shapes: Shapes
    workers: tuple[int, ...]
    links: tuple[float | None, ...]  # Mbit/s; None: not shaped
    parallel: tuple[Parallel, ...]
    layouts: tuple[Layout, ...]
    schedules: tuple[Order, ...]
    chunks: tuple[int, ...]
    compress: tuple[str, ...]
    client_layers: tuple[int, int] | None  # None: cuts balanced by what units cost
    device: str
    threads: int | None  # of every worker; None: its share of the cores
    warmup: int  # steps that are not timed
    steps: int  # that are

    def check(self) -> None:
        """ValueError for what cannot be measured here."""
        if self.model not in CUTTABLE:
            raise ValueError(f"--model is one of {', '.join(CUTTABLE)}; got {self.model!r}")
        for name, given, known in (
            ("--parallel", self.parallel, get_args(Parallel)),
            ("--layout", self.layouts, get_args(Layout)),
            ("--schedule", self.schedules, get_args(Order)),
        ):
            unknown = [value for value in given if value not in known]
            if unknown:
                raise ValueError(f"{name} takes {', '.join(known)}, separated by commas; got {unknown[0]!r}")
        check_counts(threads=self.threads, warmup=self.warmup, steps=self.steps, workers=max(self.workers))
        if not self.shapes.width <= MOST_WIDTH:
            raise ValueError(f"--width is at most {MOST_WIDTH}; got {self.shapes.width}")
        check_fits(
            f"--model {self.model} of this size, in {max(self.workers)} workers,",
            max(self.workers) * least_bytes(self.model, self.shapes),
            "take a smaller model, smaller or fewer samples, or fewer workers",
        )
        if min(self.workers) < 1 or min(self.chunks) < 1:
            raise ValueError("--workers and --chunks are whole numbers, 1 or more")
        for parts, what in ((self.chunks, "chunks"), (self.workers, "workers")):
            for count in parts:
                if self.shapes.batch_size % count:
                    raise ValueError(
                        f"all parts of a batch are of one size: --batch-size is a multiple of {count} {what}, "
                        f"not {self.shapes.batch_size}"
                    )
        find_device(self.device, [codec(spec) for spec in self.compress])
        if not any(True for _ in self.launches()):
            raise ValueError(
                "nothing to measure: --parallel none runs with --workers 1, data and pipeline with 2 or more"
            )
        check_launch(self.workers, self.links)

    def launches(self) -> Iterator[tuple[int, float | None, list[Run]]]:
        """How many workers, the links between them, and what they run one after the other."""
        alone = [Run(parallel="none")] if "none" in self.parallel else []
        together = [Run(parallel="data")] if "data" in self.parallel else []
        if "pipeline" in self.parallel:
            together += [
                Run(parallel="pipeline", layout=layout, schedule=schedule, chunks=chunks, compress=spec)
                for layout in self.layouts
                for schedule in self.schedules
                for chunks in self.chunks
                for spec in (codec(each).spec for each in self.compress)
            ]
        for workers in self.workers:
            if workers == 1 and alone:
                yield 1, None, alone
            elif workers > 1 and together:
                for link in self.links:
                    yield workers, link, together
