"""Options of one execution of a run, which may differ each time it resumes; settings.py defines the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinpipe.comm.membership import PATIENCE_S, is_served, member
from thinpipe.options import OptionError, Rule, between, check, shared_values
from thinpipe.system.sizes import parse_size
from thinpipe.train.checkpoints.best import follow_best
from thinpipe.train.checkpoints.interval import INTERVAL, parse_interval
from thinpipe.train.settings import Settings
from thinpipe.train.shaping import Shaping, parse_links
from thinpipe.train.tasks.options import COUNT
from thinpipe.train.tasks.panels import link_option, machine_option, output_option, save_option, training_option


def _step_numbers(text: str) -> tuple[int, ...]:
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise OptionError(f"{{capture_steps}} are numbers of steps, as in 10,100; got {text}")
    return tuple(sorted({int(number) for number in numbers}))


def _one_link(text: str) -> Shaping | None:
    links = parse_links(text)
    if len(links) > 1:
        raise OptionError(
            f"a run has links of one rate, as in {{link}} 100mbit; got {text}. Give one: `thinpipe bench pipeline` "
            "takes several, or start a run for each"
        )
    return links[0]


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Options for capturing tensors of a run, to measure codecs on."""

    path: Path = output_option(
        "Write activations and gradients, before compression, for `bench codecs {from_}`.",
        name="capture",
        advanced=True,
        metavar="FILE",
    )
    steps: tuple[int, ...] | None = output_option(
        "Steps to capture, as in 10,100.",
        name="capture_steps",
        advanced=True,
        metavar="N,...",
        default_text="3, spread over the run",
        parse=_step_numbers,
        rule=Rule("steps counted from 1", lambda steps: min(steps) >= 1),
        default=None,
    )
    chunks: int = output_option(  # the first ones of each such step
        "Microbatches to capture per step.",
        name="capture_chunks",
        advanced=True,
        metavar="N",
        rule=Rule("1 or more", lambda chunks: chunks >= 1),
        default=1,
    )
    limit: int = output_option(  # bytes
        "Maximum size of the file.",
        name="capture_limit",
        advanced=True,
        metavar="SIZE",
        default_text="1GiB",
        parse=parse_size,
        default=1 << 30,
    )

    def __post_init__(self) -> None:
        if self.path.suffix != ".safetensors":
            raise OptionError(f"{{capture}} writes FILE.safetensors; got {self.path}")
        check(self)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one execution of a run: may differ each time it resumes, and do not change its result."""

    activation_cache: Path | None = link_option(
        "Folder for activations of frozen layers, which are sent once and kept by the receiver.",
        metavar="DIR",
        default_text="in memory",
        per_machine=True,
        advanced=True,
        default=None,
    )
    activation_cache_limit: int = link_option(  # bytes
        "Maximum size of these activations; if they need more, or with 0B, they are sent in every epoch.",
        metavar="SIZE",
        default_text="4GiB",
        parse=parse_size,
        per_machine=True,
        advanced=True,
        default=4 << 30,
    )
    link: Shaping | None = link_option(
        "Emulate links in network namespaces: a rate, as in 100mbit; 100mbit/20mbit,40ms,0.1% for rates to and from "
        "the client, one-way delay and loss; FILE.toml for a link per pair. Needs root.",
        metavar="LINK",
        default_text="not emulated",
        parse=_one_link,
        per_machine=True,
        default=None,
    )
    memory_limit: int | None = link_option(  # bytes
        "Maximum memory per worker for microbatches in flight; it limits their number under 1f1b.",
        metavar="SIZE",
        default_text="none",
        parse=parse_size,
        advanced=True,
        default=None,
    )
    in_process: bool = link_option(
        "Run all stages in one process, through the same codecs, for ablations on one GPU.",
        per_machine=True,
        advanced=True,
        default=False,
    )
    steps: int | None = training_option(  # counted from the first of the run
        "Stop after this many steps, counted from the first.", metavar="N", default_text="all", rule=COUNT, default=None
    )
    evaluate_every: int | None = training_option(
        "Evaluate every N steps, in addition to the end of an epoch.",
        metavar="N",
        aliases=("eval_every",),
        default_text="an epoch",
        rule=COUNT,
        advanced=True,
        default=None,
    )
    trace: Path | None = output_option(
        "Timeline of one step, as a picture (.png) or for chrome://tracing (.json).",
        metavar="FILE",
        per_machine="presence",
        advanced=True,
        default=None,
    )
    capture: Capture | None = None
    save: Path | None = save_option("Folder for checkpoints.", metavar="DIR", default=None, per_machine="presence")
    save_every: int | str | None = save_option(  # steps, or a time as the user wrote it
        "Interval between checkpoints: a number of steps, or a time such as 30s, 10min or 2h.",
        metavar="N|TIME",
        default_text="an epoch and 10min",
        parse=parse_interval,
        rule=INTERVAL,
        advanced=True,
        default=None,
    )
    keep: int = save_option("Newest checkpoints to keep.", metavar="N", rule=COUNT, default=2, advanced=True)
    keep_best: bool = save_option(
        "Keep the checkpoint with the best validation metric too, as DIR/best.",
        negative=True,
        per_machine=True,
        advanced=True,
        default=True,
    )
    save_local: bool = save_option(
        "Write checkpoints on the client only; its folder need not be shared.", advanced=True, default=False
    )
    export: Path | None = save_option(
        "New folder for the trained model in the format of transformers, or for adapters in that of peft.",
        metavar="DIR",
        per_machine="presence",
        default=None,
    )
    merge: bool = save_option("Merge adapters into the weights of the exported model.", default=False, advanced=True)
    # One checkpoint, or a folder: the newest undamaged one in it.
    resume: Path | None = save_option(
        "Resume a run from its newest checkpoint, or from the one named, with its options.",
        metavar="DIR",
        kind=Path,
        parse=follow_best,
        per_machine="presence",
        default=None,
    )
    max_restarts: int = save_option(
        "Restarts from the newest checkpoint after a worker died.",
        metavar="N",
        rule=between(0, 1_000_000_000),
        per_machine=True,
        advanced=True,
        default=0,
    )
    mirror_every: int | None = machine_option(
        "Continue without a lost server: the state of all is copied to the client every N steps. More {servers} "
        "than {workers} needs are spares.",
        metavar="N",
        default_text="a lost server ends the run",
        rule=COUNT,
        default=None,
    )
    min_servers: int | None = machine_option(
        "Divide the layers among fewer servers, down to N, if a lost one does not come back within {patience}.",
        metavar="N",
        default_text="not divided again",
        rule=COUNT,
        per_machine=True,
        advanced=True,
        default=None,
    )
    patience_s: float = machine_option(
        "Seconds to wait for a missing or silent worker before the run is aborted.",
        name="patience",
        metavar="S",
        default_text=f"{PATIENCE_S:g}",
        rule=between(2, 1_000_000),
        advanced=True,
        default=PATIENCE_S,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.min_servers is not None and self.mirror_every is None:
            raise OptionError(
                "{min_servers} is for a run that continues without a lost server: give {mirror_every} too"
            )
        if self.save is None and self.save_every is not None:
            raise OptionError("{save_every} needs a folder for the checkpoints: name one with {save}")
        if self.save is None and self.save_local:
            raise OptionError("{save_local} is about checkpoints: name a folder for them with {save}")
        if self.save is None and self.max_restarts:
            raise OptionError("{max_restarts} goes on from checkpoints: name a folder for them with {save}")
        if self.merge and self.export is None:
            raise OptionError("{merge} is for {export}: name a folder with it, or leave it out")
        if self.trace is not None and self.trace.suffix not in (".png", ".json"):
            raise OptionError(
                f"{{trace}} draws a picture, FILE.png, or writes a Chrome trace, FILE.json; got {self.trace}"
            )

    def shared(self) -> dict[str, Any]:
        """Return the options that have to be equal on all workers: those that a collective depends on."""
        capture = self.capture
        captured = None if capture is None else [capture.steps, capture.chunks, capture.limit]
        return shared_values(self) | {"capture": captured}

    def last_step(self, steps: int) -> int:
        """Return the step this execution ends with, given the total number of steps."""
        return min(steps, self.steps or steps)

    def check_watchable(self, settings: Settings) -> None:
        """Raise OptionError if an option needs the stages or links of a pipeline and there is none."""
        if settings.parallel == "pipeline":
            return
        leave_out = f"of a pipeline; leave it out with {{parallel}} {settings.parallel}"
        if self.trace is not None:
            raise OptionError(f"{{trace}} shows the stages {leave_out}")
        if self.capture is not None:
            raise OptionError(f"{{capture}} keeps what crosses the links {leave_out}")
        if self.memory_limit is not None:
            raise OptionError(f"{{memory_limit}} limits the chunks in flight {leave_out}")

    def check_with(self, settings: Settings) -> None:
        """Raise OptionError unless these options fit a run with these settings."""
        parallel = settings.parallel
        self.check_watchable(settings)
        if self.mirror_every is not None and not is_served():
            raise OptionError("{mirror_every} is for runs with servers of `thinpipe serve`: name them with {servers}")
        if self.export is not None:
            settings.check_export(merge=self.merge)
        if self.in_process:
            self._check_in_process(settings)
        if self.link is not None and parallel == "none":
            raise OptionError("{link} joins several workers, and {parallel} none is one process; leave one of them out")
        if self.max_restarts and member() is not None:
            raise OptionError(
                "{max_restarts} is for workers that are started here; on several machines start all again"
            )

    def _check_in_process(self, settings: Settings) -> None:
        for apart, what in (
            (settings.parallel != "pipeline", f"{{parallel}} {settings.parallel}: it is for the stages of a pipeline"),
            (self.link is not None or member() is not None, "other machines and {link}: nothing travels"),
            (settings.is_adaptive, "{compress} auto, which measures links: nothing travels"),
            (len(set(settings.devices)) > 1, f"{{device}} {settings.device}: it computes on one device"),
            (self.trace is not None, "{trace}, which shows what workers do at the same time"),
        ):
            if apart:
                raise OptionError(f"{{in_process}} does not go together with {what}; leave one of them out")

    def processes(self, settings: Settings) -> int:
        """Return the number of processes to start."""
        return 1 if self.in_process else settings.workers


def check_devices(devices: list[str]) -> None:
    """Raise OptionError if a worker on this machine needs a GPU and there is none; ``devices`` are of all workers."""
    me = member()
    here = devices if me is None else [devices[me.rank]]
    if "cuda" in here and not torch.cuda.is_available():
        raise OptionError("{device} cuda needs a GPU that torch can use, and there is none; take {device} cpu")
