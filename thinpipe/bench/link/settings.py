"""What the link benchmark measures, checked before any worker starts."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from thinpipe.bench.inputs import check_counts, check_launch, check_seconds, find_device
from thinpipe.codecs.spec import codec
from thinpipe.measure.memory import check_fits
from thinpipe.measure.sizes import parse_size, size_text

WORKERS = 2
DEFAULT_SIZES = "1kB,10kB,100kB,1MB,10MB,100MB"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured and how; the same on both workers."""

    sizes: tuple[int, ...]  # bytes of a tensor
    compress: tuple[str, ...]  # codecs beside none, which is always measured
    links: tuple[float | None, ...]  # Mbit/s; None: not shaped
    device: str
    repeat: int  # messages of one size, at most
    budget_s: float  # for them, about
    sender_delay_s: float  # worker 0 sends so much later than it could

    def check(self) -> None:
        """ValueError for what cannot be measured here."""
        check_counts(repeat=self.repeat)
        check_seconds(budget=self.budget_s, sender_delay=self.sender_delay_s)
        largest = max(self.sizes)
        check_fits(f"--sizes {size_text(largest)}: sent and received,", 2 * largest, "take smaller ones")
        find_device(self.device, [codec(spec) for spec in self.compress])
        check_launch([WORKERS], self.links)

    @property
    def codecs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(["none", *(codec(spec).spec for spec in self.compress)]))

    def backend(self, link: float | None) -> str:
        """NCCL joins GPUs, one per worker; it would pass by a link that is shaped."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", WORKERS))  # fewer than all where torchrun started them
        own_gpus = self.device == "cuda" and torch.cuda.device_count() >= here
        return "nccl" if own_gpus and link is None else "gloo"


def parse_sizes(text: str) -> tuple[int, ...]:
    """``1kB,1.5MB,...``: thousands, as networks count."""
    sizes = []
    for part in text.split(","):
        try:
            size = parse_size(part)
        except ValueError:
            size = 0
        if size < 4:
            raise ValueError(f"--sizes are bytes of tensors, 4 or more, as in 1kB,1MB,100MB; got {part!r}")
        sizes.append(size - size % 4)  # whole floats
    return tuple(dict.fromkeys(sizes))
