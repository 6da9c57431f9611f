"""Tensors of the codec benchmark: synthetic ones that resemble activations and gradients, or tensors from a file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.system.files import check_regular, errors_named

STEP = re.compile(r"/step\d+(?=/)")  # in the names of captured tensors
_FLOAT_NAMES = ("F16", "BF16", "F32", "F64")  # safetensors' names of the dtypes that codecs compress

OUTLIER_CHANNELS = 6
OUTLIER_SCALE = 20.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tensor to compress, created or read on demand, since all together may not fit into memory."""

    content: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    # The same tensor of an earlier step, for codecs that learn; None if there is none.
    load_before: Callable[[], Tensor] | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape)) or "scalar"


def relu6(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return an activation like MobileNetV2's: half of it is exactly zero."""
    return torch.randn(shape, generator=generator).clamp_(0, 6)


def outliers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a hidden state like a transformer's: normal, with a few channels of far larger values."""
    x = torch.randn(shape, generator=generator)
    channels = x.movedim(1 if x.dim() == 4 else -1, 0)
    which = torch.linspace(0, len(channels) - 1, min(OUTLIER_CHANNELS, len(channels))).round().long()
    channels[which] *= OUTLIER_SCALE
    return x


def laplace(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a gradient: small values, a sharp peak at zero, long tails (Laplace distribution)."""
    x = torch.empty(shape).exponential_(1e3, generator=generator)
    return x.mul_(torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1))


def heavy(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a gradient with far longer tails: the values of ``laplace``, cubed."""
    return laplace(shape, generator).pow_(3)


def masked(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a gradient that passed a ReLU backward: half of it is exactly zero, at random positions."""
    x = laplace(shape, generator)
    return x.mul_(torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8))


CONTENTS: dict[str, Callable[[Sequence[int], torch.Generator], Tensor]] = {
    "relu6": relu6,
    "outliers": outliers,
    "laplace": laplace,
    "heavy": heavy,
    "masked": masked,
}
DEFAULT_CONTENTS = ("relu6", "outliers", "laplace")
DEFAULT_GPU_CONTENTS = ("relu6", "outliers", "heavy")  # where kernels differ most in speed


def made_cases(shapes: Sequence[tuple[int, ...]], contents: Sequence[str]) -> list[Case]:
    """Return each shape with each content; the values are the same in each call."""
    return [
        Case(
            content=content,
            shape=shape,
            load=partial(_make, content, shape),
            load_before=partial(_make, content, shape, seed=1),
        )
        for shape in shapes
        for content in contents
    ]


def _make(content: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return CONTENTS[content](shape, torch.Generator().manual_seed(seed))


def cases_from_file(path: Path) -> list[Case]:
    """Return the float tensors of a safetensors file, each under its name."""
    from safetensors import safe_open

    what = "safetensors to compress"
    check_regular(path, what)
    with errors_named(path, what), safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    cases = []
    before: dict[tuple[object, ...], Callable[[], Tensor]] = {}
    for name in sorted(found):  # captured tensors in the order of their steps
        shape, dtype = found[name]
        if math.prod(shape) and dtype in _FLOAT_NAMES:
            load, place = partial(_read, path, name), (shape, *STEP.split(name))
            cases.append(Case(content=name, shape=shape, load=load, load_before=before.get(place)))
            before[place] = load
    if not cases:
        raise ValueError(f"{path}: none of its {len(found)} tensors is one of floats; name a file that has some")
    return cases


def _read(path: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
