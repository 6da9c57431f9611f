"""Principal axes: the moments of rows that travelled, and from them the axes and bits that ``axes`` sends with.

Moments follow what changes while a model is trained: a step counts a fifth, those before it the rest. On hidden states
of a language model a twentieth had a quarter more squared error. Rows that are not finite teach nothing.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from thinpipe.codecs.axes import Rows
from thinpipe.codecs.base import as_bytes
from thinpipe.codecs.normal import MAX_BITS, distortion

RATE = 0.2  # of a step among all
LEAST_DEVIATION = 1e-12  # of what never changed
ENOUGH = 4  # rows for each axis before there is a first basis
PLENTY = 8  # rows for each axis in a step: more of them say nothing new


class Learner:
    """The moments of what one link sends, in a mapping that the link saves, and what is learned from them."""

    def __init__(self, kept: MutableMapping[str, Tensor], rows: Rows, bits: float, chunks: int = 1) -> None:
        self.kept, self.rows, self.bits, self.chunks = kept, rows, bits, chunks
        self._stride = stride_of(rows, chunks)
        self._step_rows = -(-rows.count // self._stride) * chunks
        self._seen = 0  # rows of the step under way
        self._sum, self._products = torch.empty(0), torch.empty(0)
        self._thread: ThreadPoolExecutor | None = None
        self._future: Future[Tensor] | None = None

    def add(self, columns: Tensor) -> None:
        """A tensor of the step under way, as ``Rows.columns`` has it."""
        if "origin" not in self.kept:
            # Of what is far from zero beside its deviation, float32 holds no mean square less a squared mean.
            self.kept["origin"] = columns.mean(2, keepdim=True).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            self.kept["mean"] = torch.zeros_like(self.kept["origin"])
            self.kept["products"] = torch.zeros_like(columns[:, :, :1]) @ torch.zeros_like(columns[:, :, :1]).mT
            self.kept["weight"] = torch.zeros((), device=columns.device)
        columns = columns[:, :, :: self._stride] - self.kept["origin"]
        total, products = columns.sum(2, keepdim=True), columns @ columns.mT
        if self._seen:
            total, products = self._sum + total, self._products + products
        self._sum, self._products = total, products
        self._seen += columns.shape[2]

    def fold(self) -> None:
        """The step under way has ended. Nobody waits for a GPU; tensors that were kept stay what they are."""
        if not self._seen:
            return
        kept, rows = self.kept, self._seen
        finite = self._products.isfinite().all() & self._sum.isfinite().all()
        news = {"mean": self._sum / rows, "products": self._products / rows, "weight": torch.ones_like(kept["weight"])}
        for name, new in news.items():
            kept[name] = torch.where(finite, kept[name] + RATE * (new - kept[name]), kept[name])
        self._seen = 0

    def start(self) -> None:
        """Learn from all steps that have ended, in a thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="thinpipe-axes")
        moments, device = dict(self.kept), self.kept["weight"].device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def work() -> Tensor:
            here = moments
            if ready is not None:
                with torch.cuda.stream(torch.cuda.Stream(device)):  # not behind what the worker has queued since then
                    torch.cuda.current_stream(device).wait_event(ready)
                    here = {name: each.cpu() for name, each in moments.items()}
            return learn(here, self.rows, self.bits, self._step_rows)

        self._future = self._thread.submit(work)

    def take(self) -> Tensor:
        """What was learned, here or before this run was taken up; on the CPU."""
        self.settle()
        return self.kept.pop("next").cpu()

    def settle(self) -> None:
        """Leave everything in the mapping."""
        self.fold()
        if self._future is not None:
            self.kept["next"], self._future = self._future.result(), None


def stride_of(rows: Rows, chunks: int) -> int:
    """Of so many rows one is enough to learn from. All places of a sample have their turn: what is at its border, or at
    the start of a sentence, is not like the rest."""
    places = rows.count // rows.shape[0]
    stride = max(1, rows.count * chunks // (PLENTY * rows.size))
    while math.gcd(stride, places) > 1:
        stride += 1
    return stride


def learn(moments: dict[str, Tensor], rows: Rows, bits: float, step_rows: int) -> Tensor:
    """What travels of a basis, see ``axes.Basis``; all on the CPU."""
    weight = moments["weight"].double().clamp(min=1e-9)
    mean = moments["mean"].double() / weight
    covariance = moments["products"].double() / weight - mean @ mean.mT
    covariance = _shrunk((covariance + covariance.mT) / 2, step_rows / RATE * float(weight))
    axes = torch.linalg.eigh(covariance).eigenvectors
    units = axes.abs().amax(1, keepdim=True) / 127
    whole = (axes / units).round()  # each column an axis, as it travels: 1 / units long
    inverse = torch.linalg.inv(whole)
    variances = ((inverse @ covariance) * inverse).sum(2)
    mean += moments["origin"].double()
    # No deviation is less than what float32 makes of the mean, so that no component overflows.
    least = max(LEAST_DEVIATION, float(mean.abs().max()) * torch.finfo(torch.float32).eps)
    deviations = torch.maximum(variances.clamp(min=0).sqrt(), least * units.flatten(1))
    bits_of = allocate((deviations / units.flatten(1)).square().view(-1), rows.planes(bits))
    parts = mean.float(), deviations.float(), whole.mT.to(torch.int8), bits_of
    return torch.cat([as_bytes(part.contiguous()) for part in parts])


def allocate(variances: Tensor, total: int) -> Tensor:
    """So many bits over normal variables, 0 to 8 each, for the least sum of squared errors; uint8.

    A bit takes less error away than the one before it, so the best ones are the best of all.
    """
    errors = torch.tensor([distortion(bits) for bits in range(MAX_BITS + 1)], dtype=torch.float64)
    gains = variances.double()[:, None] * (errors[:-1] - errors[1:])
    chosen = torch.zeros(gains.numel(), dtype=torch.uint8)
    chosen[gains.view(-1).topk(total).indices] = 1
    return chosen.view(gains.shape).sum(1, dtype=torch.uint8)


def _shrunk(covariance: Tensor, rows: float) -> Tensor:
    """Nearer to a multiple of the identity the fewer rows it is of (Chen et al., 2010: the oracle approximation).

    So no axis has no deviation at all: a value that was constant so far may change.
    """
    size = covariance.shape[-1]
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    squares = covariance.square().sum((-2, -1))
    spread = (squares - trace.square() / size).clamp(min=1e-300)
    part = ((1 - 2 / size) * squares + trace.square()) / ((rows + 1 - 2 / size) * spread)
    part = part.clamp(max=1.0)[:, None, None]
    level = (trace / size)[:, None, None] * torch.eye(size, dtype=covariance.dtype)
    return covariance + part * (level - covariance)
