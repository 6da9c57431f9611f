"""What a run is (Settings, which a checkpoint keeps) and how it is carried out this time (Running).

Every option of `thinpipe train` that shapes a run is declared here, once, and those of what is trained in trained.py;
see thinpipe/options.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from thinpipe.codecs.spec import codec
from thinpipe.measure.sizes import parse_size
from thinpipe.options import OptionError, Rule, above, below, between, check, option, pair
from thinpipe.pipeline.links.spec import check_directions, encoding
from thinpipe.pipeline.order import ORDERS, Order, is_order
from thinpipe.pipeline.partition import Layout
from thinpipe.training.events import Parallel
from thinpipe.training.trained import WHAT, Trained
from thinpipe.training.typed import from_facts
from thinpipe.workers.membership import PATIENCE_S, member
from thinpipe.workers.network import check_launch, parse_link
from thinpipe.workloads.task import LrSchedule, Optimizer

PANELS = _, _WHERE, LINKS, _HOW, OUT, _SAVE, MACHINES = (  # of the help, in this order
    WHAT,
    "Who computes what",
    "What travels",
    "How it is trained",
    "What comes out",
    "Checkpoints",
    "Several machines, and when something goes wrong",
)
_COUNT = between(1, 1_000_000_000)


def _step_numbers(text: str) -> tuple[int, ...]:
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise OptionError(f"{{capture_steps}} are numbers of steps, as in 10,100; got {text}")
    return tuple(sorted({int(number) for number in numbers}))


def _one_rate(text: str) -> float | None:
    if "," in text:
        raise OptionError(
            f"a run has links of one rate, as in {{link}} 100mbit; got {text}. Give one: `thinpipe bench pipeline` "
            "takes several, or start a run for each"
        )
    return parse_link(text)


@dataclass(frozen=True, kw_only=True)
class Settings(Trained):
    """Everything that the outcome of a run depends on.

    What has a default is missing in checkpoints of versions that did not know it, which did what the default says.
    ``movable`` is what may be other when a run goes on: who computes what and with what, and where data and weights
    are. The most of each can only be a mistake, and some would end the process without a word: OpenMP aborts where it
    cannot start its threads, torch raises where a factor is above what a float of 32 bits can be.
    """

    parallel: Parallel = option(
        "Layers on several workers, replicas of the model, or one process.", panel=_WHERE, usual="pipeline"
    )
    workers: int = option(
        "Workers to start here. Under torchrun: leave it out.",
        panel=_WHERE,
        metavar="N",
        shown="2",
        rule=between(1, 4096),
        movable=True,
    )
    layout: Layout = option(
        "Worker 0 has the first and the last layers, or only the first.",
        panel=_WHERE,
        kind=Literal["client-server", "linear"],
        usual="client-server",
        movable=True,
    )
    # None: as the work is balanced, or a line.
    client_layers: tuple[int, int] | None = option(
        "Units at both ends that stay with the client, as in 1,1.",
        panel=_WHERE,
        metavar="A,B",
        parse=pair("client_layers"),
        movable=True,
    )
    schedule: Order = option(
        "All forwards first (gpipe), or backwards as soon as can be (1f1b; 1f1b:N with N chunks on their way).",
        panel=_WHERE,
        metavar="NAME",
        rule=Rule(ORDERS, is_order),
        usual="gpipe",
    )
    chunks: int = option(  # that each worker cuts its batch into
        "Pieces of a batch that follow each other.",
        panel=_WHERE,
        metavar="N",
        shown="the task's; 1 unless a pipeline",
        rule=between(1, 1_000_000),
    )
    compress_forward: str = option(
        "Codec of activations; delta(SPEC) sends what changed of them.",
        panel=LINKS,
        metavar="SPEC",
        shown="as {compress}",
    )
    compress_backward: str = option("Codec of gradients.", panel=LINKS, metavar="SPEC", shown="as {compress}")
    batch_size: int = option("Of all replicas together.", panel=_HOW, metavar="N", rule=_COUNT)
    accumulate: int = option(
        "Batches whose gradients add up before an update.", panel=_HOW, metavar="N", rule=_COUNT, default=1
    )
    epochs: int = option("Passes over the data.", panel=_HOW, metavar="N", rule=_COUNT)
    optimizer: Optimizer = option("With momentum; or AdamW.", panel=_HOW)
    lr: float = option("Highest learning rate.", panel=_HOW, metavar="X", rule=above(0, 1e6))
    lr_schedule: LrSchedule = option("constant, cosine or polynomial, after the warm-up.", panel=_HOW, metavar="NAME")
    warmup: float = option("Part of all steps in which it rises.", panel=_HOW, metavar="X", rule=below(1))
    momentum: float = option("SGD's.", panel=_HOW, metavar="X", rule=below(1))
    nesterov: bool = option("SGD's momentum, looking one step ahead.", panel=_HOW, default=False)
    weight_decay: float = option("Pull of weights towards 0.", panel=_HOW, metavar="X", rule=between(0, 1000))
    clip_norm: float | None = option(
        "Largest norm of the gradients of all stages together.",
        panel=_HOW,
        metavar="X",
        rule=above(0, 1e30),
        default=None,
    )
    amp: bool = option("bfloat16 where that is safe (autocast).", panel=_HOW, default=False)
    recompute: bool = option("Compute activations twice instead of keeping them.", panel=_WHERE, default=False)
    seed: int = option(
        "Of weights, order, augmentation, dropout.", panel=_HOW, metavar="N", usual=0, rule=below(2**32, words="2^32")
    )
    device: str = option(
        "Where workers compute: cpu, cuda, or cpu,cuda for a client without a GPU.",
        panel=_WHERE,
        metavar="NAME",
        parse=lambda text: None if text == "auto" else text,
        shown="auto: cuda if there is one",
        rule=Rule(
            "auto, cpu, cuda, or a list of the last two: the first is the client's, the last for all that follow",
            lambda text: all(name in ("cpu", "cuda") for name in text.split(",")),
        ),
        movable=True,
    )
    threads: int | None = option(  # None: as the environment says
        "Of each worker.",
        panel=_WHERE,
        metavar="N",
        shown="cores / workers",
        rule=between(1, 1024),
        movable=True,
        default=None,
    )
    error_feedback: bool = option(
        "Replicas add what a codec lost of a gradient to the next one.", panel=LINKS, negative=True, default=True
    )

    def __post_init__(self) -> None:
        # A ValueError of theirs says what is wrong.
        check_directions(self.compress_forward, self.compress_backward)
        if self.parallel != "pipeline":
            codec(self.compress_forward)
        check(self)
        self.check_source()
        if self.parallel == "pipeline" and self.workers < 2:
            raise OptionError(
                f"a pipeline has 2 workers or more, got {self.workers}; {{parallel}} none trains in one process"
            )
        if self.parallel == "none" and self.workers != 1:
            raise OptionError(f"{{parallel}} none is one worker, got {self.workers}; leave out {{workers}}")
        if self.parallel == "data" and self.compress_forward != self.compress_backward:
            raise OptionError(
                "replicas exchange gradients only: give {parallel} data one codec with {compress}, "
                f"not {self.compress_forward} forward and {self.compress_backward} backward"
            )
        if self.parallel != "data" and not self.error_feedback:
            raise OptionError(
                "error feedback is for the gradients that replicas exchange: leave out {no_error_feedback}, or give "
                f"{{parallel}} data instead of {self.parallel}"
            )
        if self.amp and self.dtype != "float32":
            raise OptionError(
                f"{{amp}} computes in bfloat16 with float32 weights, {{dtype}} {self.dtype} has the weights in it too: "
                "give one of them"
            )
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise OptionError(
                "{nesterov} looks ahead along SGD's momentum: give {optimizer} sgd and a {momentum} above 0"
            )
        if self.device.count(",") >= self.workers:
            raise OptionError(f"{{device}} {self.device} names more than the {self.workers} workers there are")
        if self.parallel == "data" and len(set(self.devices)) > 1:
            raise OptionError(f"replicas compute on one kind of device; {{device}} {self.device} names two")
        pieces = self.chunks * self.replicas
        if self.batch_size % pieces:
            replicas = f" and {self.replicas} replicas" if self.replicas > 1 else ""
            raise OptionError(
                f"all chunks have the same size: {{batch_size}} {self.batch_size} is not a multiple of {self.chunks} "
                f"chunks{replicas}; take {max(self.batch_size // pieces, 1) * pieces}, or change {{chunks}}"
            )

    @property
    def replicas(self) -> int:
        return self.workers if self.parallel == "data" else 1

    @property
    def devices(self) -> list[str]:
        """Of every worker."""
        named = self.device.split(",")
        return (named + named[-1:] * self.workers)[: self.workers]

    @property
    def step_samples(self) -> int:
        return self.batch_size * self.accumulate

    @property
    def chunk_size(self) -> int:
        return self.batch_size // (self.chunks * self.replicas)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Settings:
        """ValueError for what is missing, unknown or of another type."""
        return from_facts(Settings, saved, "its settings")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What of a run is kept to try codecs on."""

    path: Path = option(
        "Activations and gradients, before compression, for `bench codecs {from_}`.",
        name="capture",
        panel=OUT,
        metavar="FILE",
    )
    steps: tuple[int, ...] | None = option(
        "Which steps, as in 10,100.",
        name="capture_steps",
        panel=OUT,
        metavar="N,...",
        shown="3, spread over the run",
        parse=_step_numbers,
        rule=Rule("steps counted from 1", lambda steps: min(steps) >= 1),
        default=None,
    )
    chunks: int = option(  # of each such step, the first ones
        "How many chunks of each.",
        name="capture_chunks",
        panel=OUT,
        metavar="N",
        rule=Rule("1 or more", lambda chunks: chunks >= 1),
        default=1,
    )
    limit: int = option(  # bytes
        "The most to write.",
        name="capture_limit",
        panel=OUT,
        metavar="SIZE",
        shown="1GiB",
        parse=parse_size,
        default=1 << 30,
    )

    def __post_init__(self) -> None:
        if self.path.suffix != ".safetensors":
            raise OptionError(f"{{capture}} writes FILE.safetensors; got {self.path}")
        check(self)


@dataclass(frozen=True, kw_only=True)
class Running:
    """How a run is carried out: may differ each time it is taken up, and changes nothing about where it ends."""

    delta_cache: Path | None = option(
        "Where delta(...) keeps its copies of samples.", panel=LINKS, metavar="DIR", shown="in memory", default=None
    )
    delta_cache_limit: int = option(  # bytes
        "The most of them on one machine.",
        panel=LINKS,
        metavar="SIZE",
        shown="4GiB",
        parse=parse_size,
        default=4 << 30,
    )
    link: float | None = option(  # Mbit/s between the workers
        "Workers in network namespaces with links of this rate, as in 100mbit; needs root.",
        panel=LINKS,
        metavar="RATE",
        shown="as the machine is",
        parse=_one_rate,
        default=None,
    )
    steps: int | None = option(  # counted from the very first
        "Stop after so many, for a quick look.", panel=_HOW, metavar="N", shown="all", rule=_COUNT, default=None
    )
    evaluate_every: int | None = option(
        "Evaluate after so many steps, beside the end of an epoch.",
        panel=_HOW,
        metavar="STEPS",
        shown="an epoch",
        rule=_COUNT,
        default=None,
    )
    trace: Path | None = option(
        "One step as a picture (.png) or for chrome://tracing (.json).", panel=OUT, metavar="FILE", default=None
    )
    capture: Capture | None = None
    save: Path | None = option("Folder for checkpoints.", panel=_SAVE, metavar="DIR", default=None)
    save_every: int | None = option(
        "Steps from one to the next.", panel=_SAVE, metavar="N", shown="an epoch", rule=_COUNT, default=None
    )
    keep: int = option("Of the newest.", panel=_SAVE, metavar="N", rule=_COUNT, default=2)
    save_local: bool = option(
        "The client keeps all of them: its folder need not be shared.", panel=_SAVE, default=False
    )
    export: Path | None = option(
        "The trained model as a new folder of transformers; adapters as one of peft.",
        panel=_SAVE,
        metavar="DIR",
        default=None,
    )
    merge: bool = option("Export the model with its adapters added to its weights.", panel=_SAVE, default=False)
    # One checkpoint, or a folder: the newest in it that is whole.
    resume: Path | None = option(
        "Go on where the run saved here stopped, with its options.", panel=_SAVE, metavar="DIR", default=None
    )
    max_restarts: int = option(
        "Go on by itself when a worker dies.", panel=_SAVE, metavar="N", rule=between(0, 1_000_000_000), default=0
    )
    patience_s: float = option(
        "Seconds to wait for a worker that is missing or silent.",
        name="patience",
        panel=MACHINES,
        metavar="S",
        shown=f"{PATIENCE_S:g}",
        rule=between(2, 1_000_000),
        default=PATIENCE_S,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.save is None and self.save_every is not None:
            raise OptionError("{save_every} needs a folder for the checkpoints: name one with {save}")
        if self.save is None and self.save_local:
            raise OptionError("{save_local} says who keeps the checkpoints: name a folder for them with {save}")
        if self.save is None and self.max_restarts:
            raise OptionError("{max_restarts} goes on from checkpoints: name a folder for them with {save}")
        if self.merge and self.export is None:
            raise OptionError("{merge} is for {export}: name a folder with it, or leave it out")
        if self.trace is not None and self.trace.suffix not in (".png", ".json"):
            raise OptionError(
                f"{{trace}} draws a picture, FILE.png, or writes a Chrome trace, FILE.json; got {self.trace}"
            )

    def last_step(self, steps: int) -> int:
        """Where this run ends, of so many steps in all."""
        return min(steps, self.steps or steps)

    def check_watchable(self, settings: Settings) -> None:
        """OptionError where steps are to be watched that have no stages and no links."""
        if settings.parallel == "pipeline":
            return
        leave_out = f"of a pipeline; leave it out with {{parallel}} {settings.parallel}"
        if self.trace is not None:
            raise OptionError(f"{{trace}} shows the stages {leave_out}")
        if self.capture is not None:
            raise OptionError(f"{{capture}} keeps what crosses the links {leave_out}")

    def check_with(self, settings: Settings) -> None:
        """OptionError unless a run with these settings can be carried out so, on this machine."""
        parallel = settings.parallel
        me = member()
        here = settings.devices if me is None else [settings.devices[me.rank]]
        if "cuda" in here and not torch.cuda.is_available():
            raise OptionError("{device} cuda needs a GPU that torch can use, and there is none; take {device} cpu")
        self.check_watchable(settings)
        if self.export is not None:
            settings.check_export(merge=self.merge)
        cached = self.delta_cache is not None or self.delta_cache_limit != Running.delta_cache_limit
        if cached and not encoding(settings.compress_forward).needs_samples:
            raise OptionError(
                "{delta_cache} and {delta_cache_limit} are for delta(...), and activations travel through "
                f"{settings.compress_forward}; leave them out"
            )
        if self.link is not None and parallel == "none":
            raise OptionError("{link} joins several workers, and {parallel} none is one process; leave one of them out")
        if self.max_restarts and member() is not None:
            raise OptionError(
                "{max_restarts} is for workers that are started here; on several machines start all again"
            )
        check_launch([settings.workers], [self.link])
