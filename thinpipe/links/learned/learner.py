"""The learner of a PCA basis: a moving covariance of the rows that a link sends, and the thread that decomposes it.

Moments are exponential moving averages, since the model changes in training: a step has weight 1/5, earlier steps the
rest. On hidden states of a language model, a weight of 1/20 had a quarter more squared error. Rows that are not finite
are ignored.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from concurrent.futures import Future
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.kernels import select
from thinpipe.links.learned import pca
from thinpipe.links.learned.pca import MIN_WEIGHT, one_thread
from thinpipe.links.learned.row_layout import Rows
from thinpipe.links.learned.transform import deviations, product, projection_of

Values = TypeVar("Values", Tensor, np.ndarray)

RATE = 0.2  # weight of a step in the moving average
MIN_ROWS_PER_AXIS = 4  # rows for each axis before there is a first basis
MAX_ROWS_PER_AXIS = 8  # rows for each axis in a step: more do not improve the estimate
# Steps from the start of learning to the step whose messages carry the basis. The thread takes 32 ms for two groups of
# 384 axes on the host of an H200, and a step of such a model may take little more than 10 ms.
LEAD = 3


class BasisUpdate(NamedTuple):
    """A learned basis, on the device of its link end."""

    encoded: Tensor  # uint8: the bytes that are sent
    projection: Tensor | None  # see ``Basis``; None at a receiver


class BasisLearner:
    """The moments of the rows that one link sends, in a mapping that the link saves, and the basis they give."""

    def __init__(self, state: MutableMapping[str, Tensor], rows: Rows, bits: float, chunks: int = 1) -> None:
        self.state, self.rows, self.bits, self.chunks = state, rows, bits, chunks
        self._stride = stride_of(rows, chunks)
        self._step_rows = -(-rows.count // self._stride) * chunks
        self._seen = 0  # rows of the current step
        self._buffers: list[Tensor] = []  # reused by every step: its moments, and those of a chunk other than the first
        self._future: Future[BasisUpdate] | None = None
        if "products" in state:  # of an older checkpoint that stores them separately
            state["moments"] = torch.cat([state.pop(name).flatten() for name in ("products", "mean")])

    def add(self, columns: Tensor) -> None:
        """Add a tensor of the current step, in the layout of ``Rows.columns``, to the moments."""
        if "origin" not in self.state:
            # With a mean large against its deviation, E[x^2] - E[x]^2 cancels in float32: subtract an origin first.
            self.state["origin"] = columns.mean(2, keepdim=True).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            self.state["moments"] = torch.zeros(
                self.rows.groups * self.rows.size * (self.rows.size + 1), device=columns.device
            )
            self.state["weight"] = torch.zeros((), device=columns.device)
        columns = columns[:, :, :: self._stride]
        if not self._buffers:
            self._buffers = [torch.zeros_like(self.state["moments"]) for _ in range(2)]
        step, chunk = self._buffers
        fill_moments(chunk if self._seen else step, columns, self.state["origin"], self.rows)
        if self._seen:
            step += chunk
        self._seen += columns.shape[2]

    def fold(self) -> None:
        """Fold the current step into the averages. Does not synchronize with the device or modify tensors in place."""
        if not self._seen:
            return
        before = self.state["moments"], self.state["weight"]
        moments, weight = map(torch.empty_like, before)
        fold = select("auto", weight.device).fold_moments
        fold(self._buffers[0], self.rows.size, RATE, self._seen, *before, moments, weight)
        self.state["moments"], self.state["weight"] = moments, weight
        self._seen = 0

    def center(self) -> None:
        """Move the origin of the moments to the current mean: far from the mean, moments do not give the deviation."""
        moments = torch.empty_like(self.state["moments"])
        (before, mean), (products, sums) = (_parts(flat, self.rows) for flat in (self.state["moments"], moments))
        shift = mean / self.state["weight"].clamp(min=MIN_WEIGHT)
        torch.baddbmm(before, mean, shift.mT, alpha=-1, out=products)
        sums.zero_()
        self.state["moments"], self.state["origin"] = moments, self.state["origin"] + shift

    def start(self) -> None:
        """Start learning from all completed steps, in a thread."""
        self.center()
        moments, device = dict(self.state), self.state["weight"].device
        ready = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
        if ready is not None:
            ready.record(torch.cuda.current_stream(device))

        def work() -> BasisUpdate:
            if ready is None:
                return self._learn(moments)
            ready.synchronize()  # not in the copies: while a copy blocks, no other thread can launch kernels
            with torch.cuda.stream(self._stream):
                found = self._learn({name: each.cpu() for name, each in moments.items()})
                update = BasisUpdate(
                    *(each.pin_memory().to(device, non_blocking=True) for each in found if each is not None)
                )
                self._stream.synchronize()
            return update

        self._future = pca.POOL.submit(work)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """The thread's stream, of higher priority: its copies do not queue behind the worker's kernels."""
        return torch.cuda.Stream(self.state["weight"].device, priority=-1)

    def _learn(self, moments: dict[str, Tensor]) -> BasisUpdate:
        """Return the basis of moments on the CPU that ``center`` has centered."""
        products, _ = _parts(moments["moments"].numpy(), self.rows)
        weight = max(float(moments["weight"]), MIN_WEIGHT)
        count = self._step_rows / RATE * weight
        found = pca.learn_basis(products, moments["origin"].numpy(), weight, count, self.rows, self.bits)
        return BasisUpdate(*map(torch.from_numpy, found))

    def take(self) -> BasisUpdate:
        """Return the basis that was learned, in this run or before it was resumed."""
        if self._future is None:
            encoded = self.state.pop("next")
            return BasisUpdate(encoded, sender_projection(encoded, self.rows))
        update, self._future = self._future.result(), None
        for each in update:
            if each is not None and each.is_cuda:  # allocated on the thread's stream
                each.record_stream(torch.cuda.current_stream(each.device))
        return update

    def finish(self) -> None:
        """Finish pending work and leave the complete state in the mapping."""
        self.fold()
        if self._future is not None:
            self.state["next"], self._future = self._future.result().encoded, None


def fill_moments(flat: Tensor, columns: Tensor, origin: Tensor, rows: Rows) -> None:
    """Overwrite a flat buffer with the sums over these columns of deviations from the origin, and of their products."""
    # A GPU multiplies bfloat16 several times as fast, and accumulates in float32. Rounding errors are at most 2^-8
    # relative and independent of other values: means of products are unchanged, and means of squares grow by less than
    # 2^-18. Even quantization to 8 bits per value loses more than 2^-15.
    apart = deviations(columns, origin, torch.bfloat16 if columns.is_cuda else torch.float32)
    products, sums = _parts(flat, rows)
    torch.sum(apart, 2, keepdim=True, dtype=torch.float32, out=sums)
    product(apart, apart.mT, products)


def _parts(flat: Values, rows: Rows) -> tuple[Values, Values]:
    """Return products [groups, size, size] and sums [groups, size, 1] as views of a flat buffer."""
    end = rows.groups * rows.size**2
    return flat[:end].reshape(rows.groups, rows.size, rows.size), flat[end:].reshape(rows.groups, rows.size, 1)


def is_due(step: int, rows: Rows, bits: float, chunks: int, start: int) -> bool:
    """Return True if learning starts with a step, counted from 0.

    It starts first when there were enough rows, but not before ``start``; then after 2, 4, 8 ... steps, then at the
    fixed interval of ``Rows.every``; but not while another update is being learned or about to be.
    """
    since, every = step - first_due(rows, chunks, start), rows.every(bits, chunks)
    return since >= 0 and (since % every == 0 or (LEAD <= since <= every - LEAD and since & (since - 1) == 0))


def first_due(rows: Rows, chunks: int, start: int) -> int:
    return max(start, math.ceil(MIN_ROWS_PER_AXIS * rows.size / (rows.count * chunks)))


def stride_of(rows: Rows, chunks: int) -> int:
    """Return the stride at which rows are subsampled for learning.

    It has no common divisor with the rows of a sample, so that all positions are covered: rows at a border of an image,
    or at the start of a sentence, differ from the rest.
    """
    places = rows.count // rows.shape[0]
    stride = max(1, rows.count * chunks // (MAX_ROWS_PER_AXIS * rows.size))
    while math.gcd(stride, places) > 1:
        stride += 1
    return stride


@one_thread()
def sender_projection(encoded: Tensor, rows: Rows) -> Tensor:
    """Return the projection of a basis that was sent, in this run or before it was resumed."""
    return torch.from_numpy(projection_of(encoded.cpu().numpy(), rows)).to(encoded.device)
