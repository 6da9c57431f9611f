"""Options of `thinpipe plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from thinpipe.codecs.recipes import directions
from thinpipe.codecs.spec import split_specs
from thinpipe.lab.plan.cluster import shipped
from thinpipe.lab.plan.search import NATS, Limits
from thinpipe.links.registry import check_directions
from thinpipe.options import OptionError, Rule, between, check, like, option, pair
from thinpipe.pipeline.partition import Layout
from thinpipe.system.sizes import parse_size
from thinpipe.train.events import Parallel
from thinpipe.train.running import RunOptions
from thinpipe.train.shaping import Shaping
from thinpipe.train.tasks.panels import LINKS, OUT, WHERE

_USUAL_NATS = 0.003  # presets of 3 bits and more: the validation loss of a language model differs by 0.3 %


def _codecs(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(split_specs(text)))


def _numbers(text: str) -> tuple[int, ...]:
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() and int(item) for item in items):
        raise OptionError(f"{{chunks}} are whole numbers separated by commas, as in 4,8,16; got {text}")
    return tuple(sorted({int(item) for item in items}))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The machines, the limits of the search, and the output of a plan."""

    cluster: str | None = option(
        f"Machines and links: FILE.toml, or one of {', '.join(shipped())}.",
        panel=WHERE,
        metavar="NAME",
        default_text="this machine, measured",
        default=None,
    )
    workers: int = option(
        "Workers on this machine, if it is measured.", panel=WHERE, metavar="N", rule=between(1, 64), default=2
    )
    parallel: tuple[str, ...] = option(
        "Kinds of parallelism to consider.",
        panel=WHERE,
        metavar="NAME,...",
        parse=lambda text: tuple(item.strip() for item in text.split(",")),
        rule=Rule(
            f"{', '.join(get_args(Parallel))}, separated by commas", lambda kinds: {*kinds} <= {*get_args(Parallel)}
        ),
        default=("none", "data", "pipeline"),
    )
    layout: Layout | None = option(
        "client-server keeps the first and the last layers on worker 0; linear the first only.",
        panel=WHERE,
        kind=Literal["client-server", "linear"],
        default_text="both",
        default=None,
    )
    client_layers: tuple[int, int] | None = option(
        "Fewest units of the client at the beginning and the end; with client-server only.",
        panel=WHERE,
        metavar="FIRST,LAST",
        parse=pair("client_layers", int, "1,1"),
        default_text="1,1",
        default=None,
    )
    chunks: tuple[int, ...] | None = option(
        "Numbers of microbatches to consider.",
        panel=WHERE,
        aliases=("microbatches",),
        metavar="N,...",
        parse=_numbers,
        default_text="divisors of the batch, up to 64",
        default=None,
    )
    memory_limit: int | None = option(
        "Memory that a worker may use, in addition to the limits of the machines.",
        panel=WHERE,
        metavar="SIZE",
        parse=parse_size,
        default_text="none",
        default=None,
    )
    link: Shaping | None = like(RunOptions, "link", default=None)
    compress: tuple[str, ...] = option(
        "Codecs or presets to consider.",
        panel=LINKS,
        metavar="SPEC,...",
        parse=_codecs,
        default=tuple(NATS),
    )
    nats: float | None = option(
        "Loss in nats that codecs may add, by the records of language models (docs/few-bits.md).",
        panel=LINKS,
        metavar="X",
        rule=between(0, 100),
        default=_USUAL_NATS,
    )
    from_: Path | None = option(
        "Record of an earlier plan, whose measurements are used again.",
        panel=WHERE,
        metavar="FILE.json",
        name="from_",
        default_text="measure",
        default=None,
    )
    picture: Path | None = option(
        "Picture of the predicted step.",
        panel=OUT,
        metavar="FILE.png",
        rule=Rule("a FILE.png or FILE.svg", lambda path: path.suffix.lower() in (".png", ".svg")),
        default=None,
    )

    def __post_init__(self) -> None:
        check(self)
        for spec in self.compress:
            check_directions(*directions(spec))
        if self.client_layers is not None and self.layout == "linear":
            raise OptionError("{client_layers} is for {layout} client-server; leave it out")
        if self.cluster is not None and (self.from_ is not None or self.link is not None):
            raise OptionError("{cluster} describes the machines: leave out {from_} and {link}")

    @property
    def limits(self) -> Limits:
        """The limits of the search."""
        unknown = [spec for spec in self.compress if spec not in NATS]
        return Limits(
            compress=self.compress,
            # Codecs without a measured loss, which the user has chosen, are not limited.
            nats=None if unknown else self.nats,
            memory_bytes=self.memory_limit,
            layouts=get_args(Layout) if self.layout is None else (self.layout,),
            client_layers=self.client_layers,
            chunks=self.chunks,
            parallel=self.parallel,
        )
