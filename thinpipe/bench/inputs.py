"""What a user asks the codec benchmark for, checked before the long run: every error says the rule."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from thinpipe.bench.codecs import DEFAULT_GPU_SHAPES, DEFAULT_SHAPES
from thinpipe.bench.contents import CONTENTS, DEFAULT_CONTENTS, Case, cases_from_file, made_cases
from thinpipe.bench.outside import NAMES as OUTSIDE_NAMES
from thinpipe.bench.outside import outside_codec
from thinpipe.codecs import Codec
from thinpipe.codecs.base import KernelCodec
from thinpipe.codecs.spec import codec, split_specs
from thinpipe.measure.memory import check_fits
from thinpipe.workers.membership import member
from thinpipe.workers.network import check_links

MOST_THREADS, MOST_REPEATS, MOST_SECONDS = 1024, 1_000_000_000, 1_000_000


def parse_codecs(text: str, outside: bool = False) -> list[Codec]:
    """Specs separated by commas; the same codec written twice is one. ``outside``: quantizers of others, too."""
    specs = split_specs(text)
    if not specs:
        raise ValueError("--codecs takes specs separated by commas, as in sort:8,uniform:8; got none")
    chosen = [outside_codec(spec) if outside and spec in OUTSIDE_NAMES else codec(spec) for spec in specs]
    return list(dict.fromkeys(chosen))


def parse_shape(text: str) -> tuple[int, ...]:
    """``32,32,112,112`` or ``32x32x112x112``, brackets or not."""
    sizes = re.split(r"[,x]", text.replace(" ", "").strip("[]()"))
    if not all(re.fullmatch(r"0*[1-9]\d{0,17}", size, re.ASCII) for size in sizes):  # below 2^63
        raise ValueError(f"--shape takes whole numbers from 1 to 10^18, as in 32,32,112,112; got {text[:80]!r}")
    return tuple(map(int, sizes))


def choose_cases(
    shapes: Sequence[str], contents: Sequence[str], from_file: Path | None, device: str = "cpu"
) -> list[Case]:
    """The tensors of a file, or every shape with every content; nothing given means all of the defaults."""
    if from_file is not None:
        if shapes or contents:
            raise ValueError("--from brings its own shapes and contents: give it, or --shape and --content, not both")
        return cases_from_file(from_file)
    unknown = [name for name in contents if name not in CONTENTS]
    if unknown:
        raise ValueError(f"--content is one of {', '.join(CONTENTS)}; got {unknown[0]!r}")
    defaults = DEFAULT_SHAPES if device == "cpu" else DEFAULT_GPU_SHAPES
    chosen = list(dict.fromkeys(map(parse_shape, shapes))) or list(defaults)
    for shape in chosen:
        words = ",".join(map(str, shape))
        check_fits(
            f"--shape {words}: the tensor, and what is decoded,", 8 * math.prod(shape), "take a smaller one", device
        )
    return made_cases(chosen, list(dict.fromkeys(contents)) or DEFAULT_CONTENTS)


def check_counts(**counts: int | None) -> None:
    """ValueError for a number of threads, steps or the like that can only be a mistake."""
    for name, value in counts.items():
        most = MOST_THREADS if name == "threads" else MOST_REPEATS
        if value is not None and value > most:
            raise ValueError(f"--{name.replace('_', '-')} is at most {most}; got {value}")


def check_seconds(**seconds: float) -> None:
    """ValueError for a time that is no number of seconds somebody would wait."""
    for name, value in seconds.items():
        if not 0 <= value <= MOST_SECONDS:
            raise ValueError(f"--{name.replace('_', '-')} is from 0 to {MOST_SECONDS} seconds; got {value}")


def check_launch(workers: Sequence[int], links: Sequence[float | None]) -> None:
    """ValueError where torchrun has started other workers than are asked for, or links there cannot be shaped."""
    me = member()
    if me is None:
        check_links(links)
        return
    if set(workers) != {me.size}:
        raise ValueError(f"torchrun has started {me.size} workers, this would run with {', '.join(map(str, workers))}")
    if any(link is not None for link in links):
        raise ValueError("workers on several machines have their links already: leave out --link")


def find_device(text: str, codecs: Sequence[Codec]) -> torch.device:
    """The device of that name, if it is here and the codecs run on it."""
    rule = "--device is cpu, or cuda or cuda:N where torch and the codecs can use that GPU"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError(f"{rule}; got {text!r}")
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
        for each in codecs:
            if isinstance(each, KernelCodec):
                each.kernels_on(device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{rule}; {text}: {reason}") from None
    return device
