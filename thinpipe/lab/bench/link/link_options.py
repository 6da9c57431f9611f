"""Options of the link benchmark, checked before any worker starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinpipe.codecs.recipes import RECIPES
from thinpipe.comm.membership import member
from thinpipe.lab.bench.inputs import HOW, SECONDS, WHAT, find_device, parse_codecs, shared
from thinpipe.lab.netem.network import check_launch
from thinpipe.options import OptionError, Rule, check, option
from thinpipe.system.sizes import check_fits, parse_size, size_text
from thinpipe.train.shaping import Shaping

WORKERS = 2
DEFAULT_SIZES = "1kB,10kB,100kB,1MB,10MB,100MB"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``1kB,1.5MB,...``; prefixes are decimal, as in network rates."""
    sizes = []
    for part in text.split(","):
        try:
            size = parse_size(part)
        except ValueError:
            size = 0
        if size < 4:
            raise OptionError(f"{{sizes}} are bytes of tensors, 4 or more, as in 1kB,1MB,100MB; got {part!r}")
        sizes.append(size - size % 4)  # a multiple of a float32
    return tuple(dict.fromkeys(sizes))


def _specs(text: str) -> tuple[str, ...]:
    return tuple(each.spec for each in parse_codecs(text))


@dataclass(frozen=True, kw_only=True)
class LinkBenchOptions:
    """The sizes, codecs, links and timing options of the benchmark; the same on both workers."""

    workers: int | None = shared(
        "workers",
        "Always 2, the ends of the link.",
        rule=Rule(f"{WORKERS}, the ends of the link", WORKERS.__eq__),
        default=None,
        default_value=WORKERS,
    )
    sizes: tuple[int, ...] = option(
        "Sizes of the tensors, which are float32.",
        panel=WHAT,
        metavar="SIZE,...",
        parse=parse_sizes,
        default_text=DEFAULT_SIZES,
        default=parse_sizes(DEFAULT_SIZES),
    )
    compress: tuple[str, ...] = shared(
        "compress",
        f"Codecs in addition to none, as in tile:8,kmeans:4; a preset, {', '.join(RECIPES)}, counts as two.",
        parse=_specs,
        default_text="only none",
        default=(),
    )
    links: tuple[Shaping | None, ...] = shared("link")  # None: not shaped
    device: str = shared("device", "Device of the tensors. Two GPUs use NCCL, otherwise gloo is used.")
    repeat: int = shared("repeat", "Largest number of messages per size.", default=50)
    budget_s: float = shared("budget", "Time per message size.", default=2.0)
    verify: bool = option(
        "Check rate, delay and loss of emulated links; exit code 1 if they deviate.",
        panel=WHAT,
        default=False,
    )
    probe_s: float = option(
        "Time of each probe of a link: round trip and loss, rate down, rate up; longer if it is slow. 0: none.",
        name="probe",
        panel=HOW,
        metavar="SECONDS",
        rule=SECONDS,
        default=2.0,
    )
    sender_delay_s: float = option(
        "Delay before worker 0 sends: it increases recv time, not the transfer time.",
        name="sender_delay",
        panel=HOW,
        metavar="SECONDS",
        rule=SECONDS,
        default=0.0,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.verify and not (self.probe_s and any(self.links)):
            raise OptionError("{verify} checks links that are shaped: name some with {link}, and {probe} above 0")

    def check_here(self) -> None:
        """Raise OptionError for settings that cannot be measured on this machine."""
        largest = max(self.sizes)
        check_fits(f"{{sizes}} {size_text(largest)}: sent and received,", 2 * largest, "take smaller ones")
        _ = self.found_device
        check_launch([WORKERS], self.links)

    @property
    def joined_workers(self) -> int | None:
        """The number of workers with --rank and --master."""
        return self.workers

    @property
    def codecs(self) -> tuple[str, ...]:
        return tuple(each.spec for each in parse_codecs(",".join(("none", *self.compress))))

    @property
    def found_device(self) -> torch.device:
        """The device; OptionError if it is not available or the codecs do not support it."""
        return find_device(self.device, parse_codecs(",".join(self.codecs)))

    def backend(self, link: Shaping | None) -> str:
        """Return nccl if each worker has its own GPU and the link is not shaped (NCCL may bypass it), else gloo."""
        me = member()
        here = WORKERS if me is None else me.local_size  # may be fewer than WORKERS under torchrun
        own_gpus = self.found_device.type == "cuda" and torch.cuda.device_count() >= here
        return "nccl" if own_gpus and link is None else "gloo"
