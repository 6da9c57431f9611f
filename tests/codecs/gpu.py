"""GPU kernels in tests: on a GPU where there is one, else in Triton's interpreter, on small tensors.

The interpreter runs one program after the other in numpy, so the samples are made smaller for it; what it computes is
the same.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import thinpipe
from thinpipe.codecs.kernels import Kernels

tl = pytest.importorskip("triton.language")
cuda = pytest.importorskip("thinpipe.codecs.kernels.cuda")

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    pytest.importorskip("tests.codecs.interpreter").speed_up()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CONTENTS = ("relu6", "outliers", "laplace")
MARKS = [
    pytest.mark.usefixtures("small_samples"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities and NaN in the interpreter
]
in_the_interpreter = pytest.mark.skipif(ON_GPU, reason="changes a kernel, which only the interpreter notices")


def set_constants(monkeypatch: pytest.MonkeyPatch, **constants: int) -> None:
    """Give constants of the kernels other values, wherever one was imported to."""
    for module in [m for name, m in sys.modules.items() if name.startswith(cuda.__name__)]:
        for name, value in constants.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tl.constexpr(value))


def make_samples_small(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        set_constants(monkeypatch, SAMPLE=256, SPLITTERS=64, DRAWN_VALUES=128, COPIES=1, MIDDLE=1024, BORDERS=32)
        monkeypatch.setattr(cuda.rank_search, "DIRECT", 3000)


def encoded(spec: str, x: Tensor, kernels: Kernels = cuda) -> Tensor:
    """The wire as the kernels of a module write it, over bytes that none would leave."""
    codec = thinpipe.codec(spec, kernels=kernels)
    device = DEVICE if kernels is cuda else torch.device("cpu")
    wire = torch.full((codec.wire_bytes(x.shape, x.dtype),), 0xA5, dtype=torch.uint8, device=device)
    return codec.encode(x.to(device), out=wire).cpu()


def decoded(spec: str, wire: Tensor, like: Tensor, kernels: Kernels = cuda) -> Tensor:
    device = DEVICE if kernels is cuda else torch.device("cpu")
    out = torch.full(like.shape, 12345.0, dtype=like.dtype, device=device)
    return thinpipe.codec(spec, kernels=kernels).decode(wire.to(device), out).cpu()


def receiving(x: Tensor) -> Tensor:
    """Return dtypes to decode into: the interpreter truncates to bfloat16, where a GPU rounds."""
    return x if ON_GPU or x.dtype != torch.bfloat16 else x.float()
