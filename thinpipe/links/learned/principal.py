"""Principal axes: second moments of the rows that were sent, and the PCA basis and bit allocation learned from them.

Moments are exponential moving averages, since the model changes in training: a step has weight 1/5, earlier steps the
rest. On hidden states of a language model, a weight of 1/20 had a quarter more squared error. Rows that are not finite
are ignored.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import repeat
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinpipe.codecs.kernels import select
from thinpipe.codecs.normal import MAX_BITS, distortion
from thinpipe.links.learned.blas import one_thread
from thinpipe.links.learned.transform import Basis, Rows, decode, deviations, encode, forth_of, product, views

Values = TypeVar("Values", Tensor, np.ndarray)

RATE = 0.2  # weight of a step in the moving average
LEAST_WEIGHT = 1e-9  # total weight, if no step was finite
LEAST_DEVIATION = 1e-12  # of a component that never changed
ENOUGH = 4  # rows for each axis before there is a first basis
PLENTY = 8  # rows for each axis in a step: more do not improve the estimate
# Steps from the start of learning to the step whose messages carry the basis. The thread takes 32 ms for two groups of
# 384 axes on the host of an H200, and a step of such a model may take little more than 10 ms.
LEAD = 3


class BasisUpdate(NamedTuple):
    """A learned basis, on the device of the sender."""

    told: Tensor  # uint8: the bytes that are sent
    forth: Tensor  # see ``axes.Basis``


class Learner:
    """The moments of the rows one link sends, in a mapping that the link saves, and the basis learned from them."""

    def __init__(self, kept: MutableMapping[str, Tensor], rows: Rows, bits: float, chunks: int = 1) -> None:
        self.kept, self.rows, self.bits, self.chunks = kept, rows, bits, chunks
        self._stride = stride_of(rows, chunks)
        self._step_rows = -(-rows.count // self._stride) * chunks
        self._seen = 0  # rows of the current step
        self._thread: ThreadPoolExecutor | None = None
        self._future: Future[BasisUpdate] | None = None
        if "products" in kept:  # of an older checkpoint that stores them separately
            kept["moments"] = torch.cat([kept.pop(name).flatten() for name in ("products", "mean")])

    def add(self, columns: Tensor) -> None:
        """Add a tensor of the current step, in the layout of ``Rows.columns``, to the moments."""
        if "origin" not in self.kept:
            # With a mean large against its deviation, E[x^2] - E[x]^2 cancels in float32: subtract an origin first.
            self.kept["origin"] = columns.mean(2, keepdim=True).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            self.kept["moments"] = torch.zeros(_size(self.rows), device=columns.device)
            self.kept["weight"] = torch.zeros((), device=columns.device)
        columns = columns[:, :, :: self._stride]
        if not self._seen:
            self._total.fill(columns, self.kept["origin"])
        else:
            self._more.fill(columns, self.kept["origin"])
            self._total.flat += self._more.flat
        self._seen += columns.shape[2]

    @cached_property
    def _total(self) -> _Moments:
        """The moments of the current step."""
        return _Moments(self.rows, self.kept["origin"].device)

    @cached_property
    def _more(self) -> _Moments:
        """The moments of a chunk other than the first."""
        return _Moments(self.rows, self.kept["origin"].device)

    def fold(self) -> None:
        """Fold the current step into the averages. Does not synchronize with the device or modify tensors in place."""
        if not self._seen:
            return
        before = self.kept["moments"], self.kept["weight"]
        moments, weight = map(torch.empty_like, before)
        fold = select("auto", weight.device).fold_moments
        fold(self._total.flat, self.rows.size, RATE, self._seen, *before, moments, weight)
        self.kept["moments"], self.kept["weight"] = moments, weight
        self._seen = 0

    def center(self) -> None:
        """Move the origin of the moments to the current mean: far from the mean, moments do not give the deviation."""
        moments = torch.empty_like(self.kept["moments"])
        (before, mean), (products, sums) = (_parts(flat, self.rows) for flat in (self.kept["moments"], moments))
        shift = mean / self.kept["weight"].clamp(min=LEAST_WEIGHT)
        torch.baddbmm(before, mean, shift.mT, alpha=-1, out=products)
        sums.zero_()
        self.kept["moments"], self.kept["origin"] = moments, self.kept["origin"] + shift

    def start(self) -> None:
        """Start learning from all completed steps, in a thread."""
        self.center()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="thinpipe-axes")
        moments, device = dict(self.kept), self.kept["weight"].device
        ready = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
        if ready is not None:
            ready.record(torch.cuda.current_stream(device))

        def work() -> BasisUpdate:
            if ready is None:
                return self._lesson(moments)
            ready.synchronize()  # not in the copies: while a copy blocks, no other thread can launch kernels
            with torch.cuda.stream(self._stream):
                found = self._lesson({name: each.cpu() for name, each in moments.items()})
                there = BasisUpdate(*(each.pin_memory().to(device, non_blocking=True) for each in found))
                self._stream.synchronize()
            return there

        self._future = self._thread.submit(work)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """The thread's stream, of higher priority: its copies do not queue behind the worker's kernels."""
        return torch.cuda.Stream(self.kept["weight"].device, priority=-1)

    def _lesson(self, moments: dict[str, Tensor]) -> BasisUpdate:
        arrays = {name: each.numpy() for name, each in moments.items()}
        return BasisUpdate(*map(torch.from_numpy, learn(arrays, self.rows, self.bits, self._step_rows)))

    def take(self) -> BasisUpdate:
        """Return the basis that was learned, in this run or before it was resumed."""
        if self._future is None:
            told = self.kept.pop("next")
            return BasisUpdate(told, sender_side(told, self.rows))
        lesson, self._future = self._future.result(), None
        if lesson.told.is_cuda:
            for each in lesson:  # allocated on the thread's stream
                each.record_stream(torch.cuda.current_stream(each.device))
        return lesson

    def resolve(self) -> None:
        """Finish pending work and leave the complete state in the mapping."""
        self.fold()
        if self._future is not None:
            self.kept["next"], self._future = self._future.result().told, None


class _Moments:
    """Sums over rows in one flat buffer that every step reuses, and views of its parts."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.flat = torch.empty(_size(rows), dtype=torch.float32, device=device)
        self.products, self.sums = _parts(self.flat, rows)

    def fill(self, columns: Tensor, origin: Tensor) -> None:
        """Overwrite the sums with those of these columns."""
        # A GPU multiplies bfloat16 several times as fast, and accumulates in float32. Rounding errors are at most 2^-8
        # relative and independent of other values: means of products are unchanged, and means of squares grow by less
        # than 2^-18. Even quantization to 8 bits per value loses more than 2^-15.
        dtype = torch.bfloat16 if columns.is_cuda else torch.float32
        apart = deviations(columns, origin, dtype)
        torch.sum(apart, 2, keepdim=True, dtype=torch.float32, out=self.sums)
        product(apart, apart.mT, self.products)


def _size(rows: Rows) -> int:
    return rows.groups * rows.size * (rows.size + 1)


def _parts(flat: Values, rows: Rows) -> tuple[Values, Values]:
    """Return products [groups, size, size] and sums [groups, size, 1] as views of a flat buffer."""
    end = rows.groups * rows.size**2
    return flat[:end].reshape(rows.groups, rows.size, rows.size), flat[end:].reshape(rows.groups, rows.size, 1)


def is_due(step: int, rows: Rows, bits: float, chunks: int, start: int) -> bool:
    """Return True if learning starts with a step, counted from 0.

    It starts first when there were enough rows, but not before ``start``; then after 2, 4, 8 ... steps, then at the
    fixed interval of ``Rows.every``; but not while another learning is running or about to start.
    """
    since, every = step - first_due(rows, chunks, start), rows.every(bits, chunks)
    return since >= 0 and (since % every == 0 or (LEAD <= since <= every - LEAD and since & (since - 1) == 0))


def first_due(rows: Rows, chunks: int, start: int) -> int:
    return max(start, math.ceil(ENOUGH * rows.size / (rows.count * chunks)))


def stride_of(rows: Rows, chunks: int) -> int:
    """Return the stride at which rows are subsampled for learning.

    It has no common divisor with the rows of a sample, so that all positions are covered: rows at a border of an image,
    or at the start of a sentence, differ from the rest.
    """
    places = rows.count // rows.shape[0]
    stride = max(1, rows.count * chunks // (PLENTY * rows.size))
    while math.gcd(stride, places) > 1:
        stride += 1
    return stride


def warm_up_learner(x: Tensor, rows: Rows, bits: float, chunks: int) -> None:
    """Run the encoder and decoder of both ends once, to compile their kernels before a step. Overwrites ``x``."""
    columns = rows.columns(x)
    learner = Learner({}, rows, bits, chunks)
    learner.add(columns)
    learner.fold()
    told = torch.zeros(rows.learned_bytes, dtype=torch.uint8, device=x.device)
    basis = Basis.read(told, rows, bits, torch.zeros(rows.groups, rows.size, rows.size, device=x.device))
    wire = torch.empty(rows.wire_bytes(bits), dtype=torch.uint8, device=x.device)
    encode(columns, basis, rows, wire)
    decode(wire, basis, rows, x)


@one_thread()
def sender_side(told: Tensor, rows: Rows) -> Tensor:
    """Return the sender's projection matrix for a basis that was sent, in this run or before it was resumed."""
    return torch.from_numpy(forth_of(told.cpu().numpy(), rows)).to(told.device)


@one_thread()
def learn(moments: dict[str, np.ndarray], rows: Rows, bits: float, step_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a new basis and its ``forth``: see ``Basis``. Moments are centered by ``Learner.center``.

    Uses NumPy: torch would start another OpenMP thread pool for this thread, and with more threads than cores OpenMP
    puts all of them to sleep between any two loops. Training on two cores took twice as long.
    """
    weight = max(float(moments["weight"]), LEAST_WEIGHT)
    told = np.empty(rows.learned_bytes, np.uint8)
    mean, deviations, axes, bits_of = views(told, rows)
    mean[...] = moments["origin"]
    products, _ = _parts(moments["moments"], rows)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:  # the other cores are for training
        found = pool.map(_find_axes, products, repeat(step_rows / RATE * weight), axes)
        inverse, units, variances = map(np.stack, zip(*found, strict=True))
    # Deviations are at least the float32 rounding error of the mean, so that no component overflows.
    least = max(LEAST_DEVIATION, float(np.abs(mean).max()) * float(np.finfo(np.float32).eps))
    exact = np.maximum(np.sqrt(variances / weight), least * units)
    deviations[...] = exact
    bits_of[...] = allocate(np.square(exact / units).reshape(-1), rows.planes(bits)).reshape(bits_of.shape)
    return told, forth_of(told, rows, inverse)


def _find_axes(products: np.ndarray, rows: float, axes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill in a group's axes as int8, each with a separate unit; return their inverse, units, and variances in units.

    Few operations and little memory: after each operation the thread waits for the GIL, and on some machines allocating
    memory takes longer than filling it. float32 where it loses less than the 8 bits of an axis; NumPy inverts in
    float64.
    """
    eigenvalues, vectors = np.linalg.eigh(products.astype(np.float64))
    vectors = vectors.astype(np.float32)
    units = np.abs(vectors).max(0) / 127
    whole = vectors / units
    np.rint(whole, out=whole)
    axes[...] = whole.T
    inverse = np.linalg.inv(whole)
    shares = np.square(inverse @ vectors, out=whole)  # a sum of squares, not a difference that would cancel in float32
    variances = shares @ _shrunk(eigenvalues, rows).astype(np.float32)
    return inverse, units[:, None], variances.astype(np.float64)[:, None]


def allocate(variances: np.ndarray, total: int) -> np.ndarray:
    """Allocate ``total`` bits over normal variables, 0 to 8 each, for the least sum of squared errors; return uint8.

    This is reverse water-filling. Each further bit of a variable removes less error than the one before it, so the
    greedy choice is optimal.
    """
    errors = np.array([distortion(bits) for bits in range(MAX_BITS + 1)])
    gains = variances[:, None] * (errors[:-1] - errors[1:])
    chosen = np.zeros(gains.size, np.uint8)
    chosen[np.argsort(-gains.reshape(-1), kind="stable")[:total]] = 1
    return chosen.reshape(gains.shape).sum(1, dtype=np.uint8)


def _shrunk(variances: np.ndarray, rows: float) -> np.ndarray:
    """Return variances shrunk towards their mean, more for fewer rows (oracle approximation, Chen et al., 2010).

    So every axis has a deviation above 0: a value that was constant so far may change.
    """
    variances = variances.astype(np.float64).clip(0, np.finfo(np.float32).max)
    size, total, squares = len(variances), variances.sum(), np.square(variances).sum()
    most = (1 - 2 / size) * squares + total**2
    part = most / max(most, (rows + 1 - 2 / size) * (squares - total**2 / size), 1e-300)
    return variances + part * (total / size - variances)
