"""Settings of the link benchmark, checked before any worker starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinpipe.codecs.recipes import RECIPES
from thinpipe.comm.membership import member
from thinpipe.comm.shaping import Shaping
from thinpipe.lab.bench.inputs import HOW, SECONDS, WHAT, find_device, parse_codecs, shared
from thinpipe.lab.netem.network import check_launch
from thinpipe.options import OptionError, check, option
from thinpipe.system.sizes import check_fits, parse_size, size_text

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

    sizes: tuple[int, ...] = option(
        "Bytes of a tensor of float32.",
        panel=WHAT,
        metavar="SIZE,...",
        parse=parse_sizes,
        shown=DEFAULT_SIZES,
        default=parse_sizes(DEFAULT_SIZES),
    )
    compress: tuple[str, ...] = shared(
        "compress",
        f"Codecs to send through beside none, as in tile:8,kmeans:4; a recipe, {', '.join(RECIPES)}, is its two.",
        parse=_specs,
        shown="none alone",
        default=(),
    )
    links: tuple[Shaping | None, ...] = shared("link")  # None: not shaped
    device: str = shared("device", "Where tensors live. Two GPUs talk through NCCL, else gloo.")
    repeat: int = shared("repeat", "Messages of one size, at most.", default=50)
    budget_s: float = shared("budget", "Time for messages of one size.", default=2.0)
    verify: bool = option(
        "Hold shaped links against what was asked for; exit code 1 if one is off.", panel=WHAT, default=False
    )
    probe_s: float = option(
        "Time for each of a link's round trip and loss, rate down and rate up; more where it is slow. 0: not measured.",
        name="probe",
        panel=HOW,
        metavar="SECONDS",
        rule=SECONDS,
        default=2.0,
    )
    sender_delay_s: float = option(
        "Worker 0 sends so much later than it could: recv time grows, the transfer does not.",
        name="sender_delay",
        panel=HOW,
        metavar="SECONDS",
        rule=SECONDS,
        default=0.0,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.verify and not (self.probe_s and any(self.links)):
            raise OptionError("{verify} measures links that are shaped: name some with {link}, and {probe} above 0")

    def check_here(self) -> None:
        """Raise OptionError for settings that cannot be measured on this machine."""
        largest = max(self.sizes)
        check_fits(f"{{sizes}} {size_text(largest)}: sent and received,", 2 * largest, "take smaller ones")
        _ = self.found_device
        check_launch([WORKERS], self.links)

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
