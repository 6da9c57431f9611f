"""Options of the codec benchmark, checked before the run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from thinpipe.codecs import FAMILIES, Codec
from thinpipe.codecs.recipes import RECIPES
from thinpipe.lab.bench.codecs.baselines import BASELINES
from thinpipe.lab.bench.codecs.synthetic import (
    CONTENTS,
    DEFAULT_CONTENTS,
    DEFAULT_GPU_CONTENTS,
    Case,
    cases_from_file,
    made_cases,
)
from thinpipe.lab.bench.inputs import HOW, RESULTS, WHAT, find_device, parse_codecs, shared
from thinpipe.options import OptionError, check, option
from thinpipe.system.sizes import check_fits

DEFAULT_SHAPES = ((32, 32, 112, 112), (32, 1280, 7, 7), (8, 128, 768), (16, 24, 56, 56))
DEFAULT_GPU_SHAPES = ((256, 32, 112, 112), (32, 128, 768))
DEFAULT_CODECS = (
    f"none,fp16,bf16,{','.join(RECIPES)},uniform:4,uniform:8,sort:4,sort:8,sort:12,sort:16,fast:4,fast:8,"
    "tile:4,kmeans:2,kmeans:4,kmeans:8,gauss:2,gauss:4,svd:14,power:14,topk:0.01,topk:0.1"
)


@dataclass(frozen=True, kw_only=True)
class CodecBenchOptions:
    """The codecs, tensors and timing options of the codec benchmark."""

    compress: str = shared(
        "compress",
        f"Codecs by their specs, separated by commas; a preset, {', '.join(RECIPES)}, counts as two. Families: "
        f"{', '.join(FAMILIES)}; axes, learned from the tensor of the step before. Baselines: "
        f"{', '.join(BASELINES)} of bitsandbytes, if installed.",
        default_text="the presets, and several of each family",
        default=DEFAULT_CODECS,
        old_name="codecs",
    )
    shape: tuple[str, ...] = option(
        "Shape of the tensors; repeatable.",
        panel=WHAT,
        metavar="N,...",
        kind=list[str],
        parse=tuple,
        default_text=" ".join(",".join(map(str, shape)) for shape in DEFAULT_SHAPES),
        default=(),
    )
    content: tuple[str, ...] = option(
        "Values of the tensors; repeatable. relu6: an activation, half zeros. outliers: normal, six channels 20 times "
        "larger. laplace: a gradient. heavy: a gradient with longer tails. masked: a gradient, half zeros.",
        panel=WHAT,
        metavar="NAME",
        kind=list[str],
        parse=tuple,
        default_text=f"{' '.join(DEFAULT_CONTENTS)}; on a GPU {' '.join(DEFAULT_GPU_CONTENTS)}",
        default=(),
    )
    from_: Path | None = option(
        "Compress the float tensors of this .safetensors file instead. For captured tensors, such as "
        "forward/0-1/0/step000003/chunk0, tables show the mean per link.",
        panel=WHAT,
        metavar="FILE",
        default=None,
    )
    verify: bool = option(
        "Also compare the codecs with the reference implementations; adds minutes. Exit code 1 if a guarantee does not "
        "hold.",
        panel=WHAT,
        default=False,
    )
    reference: Literal["largest", "all", "none"] = option(
        "Tensors on which to time the reference implementations, seconds each.", panel=HOW, default="largest"
    )
    device: str = shared("device")
    threads: int | None = shared("threads", "CPU threads.", default_text="all cores")
    repeat: int = shared("repeat", "Largest number of timed calls.", default=20)
    budget: float = shared("budget", "Time per codec and tensor for the timed calls, approximate.", default=0.2)
    by_bits: bool = option(
        "Sort tables by bits per value on the wire.",
        panel=RESULTS,
        default=False,
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def codecs(self) -> list[Codec]:
        """The codecs of ``compress``; OptionError for an invalid spec."""
        return parse_codecs(self.compress, baselines=True)

    @property
    def found_device(self) -> torch.device:
        """The device; OptionError if it is not available or the codecs do not support it."""
        return find_device(self.device, self.codecs)

    @property
    def joined_workers(self) -> None:
        """None: this benchmark has no workers."""

    def check_here(self) -> None:
        """Raise OptionError for options that cannot be measured on this machine."""
        self.cases()

    def cases(self) -> list[Case]:
        """Return the tensors of the file, or each shape with each content, by default all default ones."""
        if self.from_ is not None:
            if self.shape or self.content:
                raise OptionError("{from_} has shapes and contents: give it, or {shape} and {content}, not both")
            return cases_from_file(self.from_)
        unknown = [name for name in self.content if name not in CONTENTS]
        if unknown:
            raise OptionError(f"{{content}} is one of {', '.join(CONTENTS)}; got {unknown[0]!r}")
        device = self.found_device.type
        default_shapes = DEFAULT_SHAPES if device == "cpu" else DEFAULT_GPU_SHAPES
        default_contents = DEFAULT_CONTENTS if device == "cpu" else DEFAULT_GPU_CONTENTS
        shapes = list(dict.fromkeys(map(parse_shape, self.shape))) or list(default_shapes)
        for shape in shapes:
            text, needed = ",".join(map(str, shape)), 8 * math.prod(shape)
            check_fits(f"{{shape}} {text}: the tensor and its decoded copy,", needed, "take a smaller one", device)
        return made_cases(shapes, list(dict.fromkeys(self.content)) or default_contents)


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse ``32,32,112,112`` or ``32x32x112x112``, with or without brackets."""
    sizes = re.split(r"[,x]", text.replace(" ", "").strip("[]()"))
    if not all(re.fullmatch(r"0*[1-9]\d{0,17}", size, re.ASCII) for size in sizes):  # below 2^63
        raise OptionError(f"{{shape}} takes whole numbers from 1 to 10^18, as in 32,32,112,112; got {text[:80]!r}")
    return tuple(map(int, sizes))
