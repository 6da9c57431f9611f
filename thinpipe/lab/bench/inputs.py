"""Options that several benchmarks share, and their parsers: codecs, devices, threads, links."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from thinpipe.codecs import Codec, codec
from thinpipe.codecs.base import KernelCodec
from thinpipe.codecs.recipes import codecs_of, directions
from thinpipe.codecs.spec import split_specs
from thinpipe.lab.bench.codecs.baselines import BASELINES, OfflinePCA, baseline_codec
from thinpipe.links.learned.pca_codec import PCACodec
from thinpipe.links.registry import link_codec
from thinpipe.options import OptionError, Rule, between, option
from thinpipe.system.sanitize import first_line
from thinpipe.train.shaping import parse_links

PANELS = WHAT, HOW, RESULTS = "What is measured", "How it is measured", "Output"  # panels of the help, in this order
MOST_THREADS, MOST_REPEATS = 1024, 1_000_000_000
COUNT = between(1, MOST_REPEATS)
SECONDS = Rule("from 0 to 1000000 seconds", between(0, 1_000_000).holds)


# Options with the same meaning in several benchmarks; each benchmark adds its own help text and default.
_SHARED: dict[str, dict[str, Any]] = {
    "compress": {"panel": WHAT, "metavar": "SPEC,..."},
    "link": {
        "help": "Emulate links in network namespaces: rates, as in 10mbit,100mbit,1gbit; 100mbit/20mbit,40ms,0.1% for "
        "rates to and from the client, one-way delay and loss; FILE.toml for a link per pair; none: not "
        "emulated. Needs root.",
        "panel": WHAT,
        "metavar": "LINK,...",
        "parse": lambda text: tuple(parse_links(text)),
        "default_text": "none",
        "default": (None,),
    },
    "workers": {"panel": WHAT, "metavar": "N", "rule": between(1, 4096)},
    "batch_size": {"help": "Samples per batch, over all workers.", "panel": WHAT, "metavar": "N", "rule": COUNT},
    "device": {
        "help": "Device of the tensors.",
        "panel": HOW,
        "metavar": "auto|cpu|cuda",
        "default_text": "auto: cuda if there is one",
        "default": "auto",
    },
    "threads": {"panel": HOW, "metavar": "N", "rule": between(1, MOST_THREADS), "default": None},
    "steps": {"help": "Timed steps.", "panel": HOW, "metavar": "N", "rule": COUNT, "old_name": "iterations"},
    "skip_steps": {
        "help": "Warm-up steps before {steps}, which are not timed.",
        "panel": HOW,
        "metavar": "N",
        "rule": between(0, MOST_REPEATS),
        "old_name": "warmup",  # in training, warmup is a fraction of all steps
    },
    "repeat": {"panel": HOW, "metavar": "N", "rule": COUNT},
    "budget": {"panel": HOW, "metavar": "SECONDS", "rule": SECONDS},
}


def shared(name: str, help: str = "", **facts: Any) -> Any:
    """Return the field of a shared option; ``facts`` override its properties, as in ``option``."""
    merged = {**_SHARED[name], "name": name, **facts}
    return option(help or merged.pop("help"), **{key: value for key, value in merged.items() if key != "help"})


def parse_codecs(text: str, baselines: bool = False) -> list[Codec]:
    """Return the codecs of specs separated by commas, without duplicates; a preset is its two codecs.

    ``baselines`` also accepts those of the codec benchmark: bitsandbytes quantizers, and ``axes`` without a link.
    """
    chosen: dict[Codec, None] = {}
    for spec in split_specs(text):
        if baselines and spec in BASELINES:
            chosen[baseline_codec(spec)] = None
        else:
            chosen |= dict.fromkeys(map(_codec_or_axes, directions(spec)) if baselines else codecs_of(spec))
    if not chosen:
        raise OptionError("{compress} takes specs and presets separated by commas, as in 8bit,sort:8; got none")
    return list(chosen)


def _codec_or_axes(spec: str) -> Codec:
    found = link_codec(spec)
    return OfflinePCA(found.bits) if isinstance(found, PCACodec) else codec(spec)


def find_device(text: str, codecs: Sequence[Codec]) -> torch.device:
    """Return the device of that name; raise OptionError if it is unavailable or a codec does not support it."""
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
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError if it was built without CUDA
        raise OptionError(f"{rule}; {text}: {first_line(error)}") from None
    return device
