"""What several benchmarks ask for in the same way: codecs, devices, threads; checked before the long run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import torch

from thinpipe.bench.codecs.bitsandbytes import NAMES as OUTSIDE_NAMES
from thinpipe.bench.codecs.bitsandbytes import outside_codec
from thinpipe.codecs import Codec
from thinpipe.codecs.base import KernelCodec
from thinpipe.codecs.recipes import directions
from thinpipe.codecs.spec import split_specs, tensor_codec
from thinpipe.options import OptionError, Rule, between, option

PANELS = WHAT, HOW, RESULTS = "What is measured", "How it is measured", "What comes out"  # of the help, in this order
MOST_THREADS, MOST_REPEATS = 1024, 1_000_000_000
COUNT = between(1, MOST_REPEATS)
SECONDS = Rule("from 0 to 1000000 seconds", between(0, 1_000_000).holds)


def machine_option(name: Literal["device", "threads"], help: str, **facts: Any) -> Any:
    """An option that is the same in every benchmark, but for what it is about."""
    if name == "device":
        facts = {"metavar": "auto|cpu|cuda", "shown": "auto: cuda if there is one", "default": "auto", **facts}
    else:
        facts = {"metavar": "N", "rule": between(1, MOST_THREADS), "default": None, **facts}
    return option(help, panel=HOW, **facts)


def parse_codecs(text: str, outside: bool = False) -> list[Codec]:
    """Specs separated by commas, a recipe for its two; none twice. ``outside``: quantizers of others, too."""
    chosen: dict[Codec, None] = {}
    for spec in split_specs(text):
        if outside and spec in OUTSIDE_NAMES:
            chosen[outside_codec(spec)] = None
        else:
            chosen |= dict.fromkeys(map(tensor_codec, directions(spec)))
    if not chosen:
        raise OptionError("{compress} takes specs and recipes separated by commas, as in 8bit,sort:8; got none")
    return list(chosen)


def find_device(text: str, codecs: Sequence[Codec]) -> torch.device:
    """The device of that name, if it is here and the codecs run on it."""
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    rule = "{device} is auto, cpu, or cuda or cuda:N where torch and the codecs can use that GPU"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise OptionError(f"{rule}; got {text!r}")
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
        for each in codecs:
            if isinstance(each, KernelCodec):
                each.kernels_on(device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        reason = str(error).partition("\n")[0]
        raise OptionError(f"{rule}; {text}: {reason}") from None
    return device
