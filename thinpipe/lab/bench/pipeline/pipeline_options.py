"""Options of the pipeline benchmark, checked before any worker starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from thinpipe.codecs import Codec
from thinpipe.codecs.recipes import RECIPES, directions
from thinpipe.codecs.spec import split_specs
from thinpipe.lab.bench.inputs import COUNT, HOW, MOST_REPEATS, WHAT, find_device, shared
from thinpipe.lab.bench.models import CUTTABLE, Shapes, check_named, least_bytes
from thinpipe.lab.netem.network import check_launch
from thinpipe.links.registry import link_codec
from thinpipe.options import OptionError, Rule, check, option, pair
from thinpipe.pipeline.order import ORDERS, Order, is_order
from thinpipe.pipeline.partition import Layout
from thinpipe.system.sizes import check_fits
from thinpipe.train.shaping import Shaping
from thinpipe.train.tasks.task import Source

Parallel = Literal["none", "data", "pipeline"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the benchmark: a kind of parallelism on a number of workers over a link."""

    workers: int
    link: Shaping | None = None  # None: not shaped
    parallel: Parallel
    layout: Layout | None = None  # this and the following: only for a pipeline
    schedule: Order | None = None
    chunks: int | None = None
    compress: str | None = None  # a spec, or the name of a preset
    stage: Literal["torch"] | None = None  # None: thinpipe's, as in older records


def _items(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.strip() for item in text.split(",")))


def _numbers(name: str) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        if not all(item.isdecimal() for item in _items(text)):
            raise OptionError(f"{{{name}}} takes whole numbers separated by commas, as in 1,2,4; got {text!r}")
        return tuple(map(int, _items(text)))

    return parse


def _several(help: str, kind: Any, *usual: str, **facts: Any) -> Any:
    """Return an option that takes several values of a Literal, separated by commas."""
    known = get_args(kind)
    rule = Rule(f"{', '.join(known)}, separated by commas", lambda given: set(given) <= set(known))
    return option(help, panel=WHAT, metavar="NAME,...", parse=_items, rule=rule, default=usual, **facts)


_COUNTS = Rule("whole numbers, 1 or more", lambda given: all(1 <= each <= MOST_REPEATS for each in given))


@dataclass(frozen=True, kw_only=True)
class PipelineBenchOptions:
    """The model, parallelism, links and timing options of the benchmark; the same on all workers."""

    shapes: Shapes
    model: str = option(
        f"One of {', '.join(CUTTABLE)}; or a causal language model as thinpipe train takes it, with random weights.",
        panel=WHAT,
        metavar="NAME",
        default="roberta",
    )
    config: str | None = option(
        "Model by its configuration, with random weights: a folder, a name on the hub, or a model type, as in llama.",
        panel=WHAT,
        metavar="NAME",
        default=None,
    )
    config_set: str | None = option(
        "Values that override the configuration, as in hidden_size=256,num_hidden_layers=4.",
        panel=WHAT,
        metavar="NAME=X,...",
        default=None,
    )
    trust_remote_code: bool = option("Run code that comes with the model.", panel=WHAT, default=False)
    workers: tuple[int, ...] = shared(
        "workers",
        "Numbers of workers; 1 is a single process.",
        metavar="N,...",
        parse=_numbers("workers"),
        rule=_COUNTS,
        default=(1, 2),
    )
    parallel: tuple[Parallel, ...] = _several(
        "none: a single process. data: DistributedDataParallel, each worker a part of the batch. pipeline.",
        Parallel,
        *get_args(Parallel),
    )
    layouts: tuple[Layout, ...] = _several(
        "Order of stages: linear, client-server.", Layout, "client-server", name="layout"
    )
    schedules: tuple[Order, ...] = option(
        "gpipe; 1f1b, with a number of chunks in flight that hides the delay of the link; 1f1b:N, with N chunks.",
        panel=WHAT,
        metavar="NAME,...",
        parse=_items,
        rule=Rule(f"{ORDERS}, separated by commas", lambda given: all(map(is_order, given))),
        default=("gpipe",),
        name="schedule",
    )
    chunks: tuple[int, ...] = option(
        "Microbatches per batch.",
        panel=WHAT,
        aliases=("microbatches",),
        metavar="N,...",
        parse=_numbers("chunks"),
        rule=_COUNTS,
        default=(8,),
    )
    compress: tuple[str, ...] = shared(
        "compress",
        f"Codecs of both directions, or presets: {', '.join(RECIPES)}.",
        parse=lambda text: tuple(dict.fromkeys(split_specs(text))),
        default=("none", "8bit"),
    )
    baseline: Literal["torch"] | None = option(
        "Also measure torch's own stage, which sends uncompressed; with {layout} linear under torch's own schedule.",
        panel=WHAT,
        metavar="torch",
        default_text="none",
        default=None,
    )
    client_layers: tuple[int, int] | None = option(
        "Units of the client at the beginning and the end.",
        panel=WHAT,
        metavar="FIRST,LAST",
        parse=pair("client_layers", int, "1,1"),
        default_text="balanced by measured cost",
        default=None,
    )
    links: tuple[Shaping | None, ...] = shared("link")  # None: not shaped
    device: str = shared("device", "Device of the workers, which share GPUs if there are too few.")
    threads: int | None = shared("threads", "CPU threads per worker.", default_text="cores / workers")
    warmup: int = shared("skip_steps", rule=COUNT, default=2)
    steps: int = shared("steps", "Timed steps of each row.", old_name="", default=5)
    interleave: int | None = option(
        "Rows that are measured together, alternating step by step, so that other load affects all alike. Models "
        "are in memory together; 1 measures one row after the other.",
        panel=HOW,
        metavar="N",
        rule=COUNT,
        default_text="all rows",
        default=None,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.config is not None and self.model != type(self).model:
            raise OptionError("{model} and {config} both name the model: give one of them")
        if self.config_set is not None and self.config is None:
            raise OptionError("{config_set} overrides values of {config}: name a model type or a folder with {config}")
        for parts, what in ((self.chunks, "chunks"), (self.workers, "workers")):
            for count in parts:
                if self.shapes.batch_size % count:
                    raise OptionError(
                        f"all parts of a batch are of one size: {{batch_size}} is a multiple of {count} {what}, "
                        f"not {self.shapes.batch_size}"
                    )
        list(self._codecs())  # raises OptionError for an invalid spec
        if not self.variants():
            raise OptionError(
                "nothing to measure: {parallel} none runs with {workers} 1, data and pipeline with 2 or more"
            )

    def check_here(self) -> None:
        """Raise OptionError for settings that cannot be measured on this machine."""
        if self.source is not None:
            check_named(self.source)
        together = min(self.interleave or len(self.variants()), len(self.variants()))
        check_fits(
            f"{{model}} {self.model} of this size, in {max(self.workers)} workers and for {together} rows at once,",
            max(*self.workers, together) * (0 if self.source is not None else least_bytes(self.model, self.shapes)),
            "take a smaller model, smaller or fewer samples, fewer workers, or fewer rows at once with {interleave}",
        )
        if self.baseline and self.found_device.type != "cpu":
            raise OptionError(
                "{baseline} torch sends tensors from their device, which gloo cannot do from a GPU: use {device} cpu, "
                f"not {self.device}"
            )
        check_launch(self.workers, self.links)

    @property
    def joined_workers(self) -> int | None:
        """The number of workers with --rank and --master: one, not a list."""
        return self.workers[0] if len(self.workers) == 1 else None

    @property
    def source(self) -> Source | None:
        """The user's own model; None for a model of CUTTABLE."""
        if self.config is None and self.model in CUTTABLE:
            return None
        return Source(
            model=self.model if self.config is None else None,
            config=self.config,
            config_set=self.config_set,
            trust_remote_code=self.trust_remote_code,
            pretrained=False,
        )

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.config or self.model

    @property
    def found_device(self) -> torch.device:
        """The device; OptionError if it is not available or the codecs do not support it."""
        return find_device(self.device, list(self._codecs()))

    def _codecs(self) -> Iterator[Codec]:
        """Yield the codecs of both directions of each value of ``compress``."""
        for text in self.compress:
            forward, backward = map(link_codec, directions(text))
            backward.check_direction("backward")
            yield from (*forward.codecs, *backward.codecs)

    def _senders(self) -> Iterator[tuple[str, Literal["torch"] | None]]:
        """Yield the pairs of codec and stage: torch's stage sends uncompressed, thinpipe's with each codec."""
        if self.baseline:
            yield "none", self.baseline
        for text in self.compress:
            yield text if text in RECIPES else link_codec(text).spec, None

    def variants(self) -> list[Variant]:
        """Return the rows in the order of the tables: each kind of parallelism, number of workers and link."""
        pipelines: list[dict[str, Any]] = [
            {"layout": layout, "schedule": schedule, "chunks": chunks, "compress": spec, "stage": stage}
            for layout in self.layouts
            for schedule in self.schedules
            for chunks in self.chunks
            for spec, stage in self._senders()
        ]
        found = []
        for workers in self.workers:
            if workers == 1 and "none" in self.parallel:
                found.append(Variant(workers=1, parallel="none"))
            for link in self.links if workers > 1 else ():
                if "data" in self.parallel:
                    found.append(Variant(workers=workers, link=link, parallel="data"))
                if "pipeline" in self.parallel:
                    found += [Variant(workers=workers, link=link, parallel="pipeline", **each) for each in pipelines]
        return found
