"""PCA of groups of values from their covariance: eigendecomposition, and bit allocation by reverse water-filling.

All of it runs on the CPU, in the threads of ``POOL``, with NumPy: torch would start another OpenMP thread pool for each
of these threads, and with more threads than cores OpenMP puts all of them to sleep between any two loops. Training on
two cores took twice as long.

NumPy is limited to the calling thread. OpenBLAS, which its wheels contain, distributes even a matrix of a few hundred
columns over all cores and synchronizes them repeatedly while it factorizes. If other work uses those cores, as in
training, that is many times slower: eigenvectors of two 384 x 384 matrices took 26 ms on one thread and 54 to 4600 ms
on two, on two cores that were also used by other work. So results do not depend on the number of cores either.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from thinpipe.codecs.normal import MAX_BITS, distortion
from thinpipe.links.learned.row_layout import Rows
from thinpipe.links.learned.transform import basis_views, projection_of

Result = TypeVar("Result")

MIN_WEIGHT = 1e-9  # total weight, if no step was finite
MIN_DEVIATION = 1e-12  # of a component that never changed
POOL = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4), "thinpipe-pca")  # the other cores are for training

_lock = threading.Lock()
_inside, _before = 0, 0  # threads inside ``one_thread``, and OpenBLAS's number of threads before


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit OpenBLAS to one thread until the last caller leaves; its setting is process-wide only."""
    global _inside, _before
    blas = _numpys()
    with _lock:
        if blas and not _inside:
            _before = blas.get_num_threads()
            blas.set_num_threads(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if blas and not _inside:
                blas.set_num_threads(_before)


@cache
def _numpys() -> Any:
    """Return NumPy's own OpenBLAS, not a library that torch uses; None if NumPy uses another BLAS."""
    libraries = ThreadpoolController().lib_controllers
    return next((each for each in libraries if each.internal_api == "openblas" and "numpy" in each.filepath), None)


@one_thread()
def learn_basis(
    products: np.ndarray, origin: np.ndarray, weight: float, count: float, rows: Rows, bits: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a PCA basis and its projection (``Basis``).

    Args:
        products: sums of products of the values of a group, centered on ``origin``: [groups, size, size].
        weight: the total weight of the rows in these sums.
        count: the number of rows that they are worth.
    """
    encoded = np.empty(rows.basis_bytes, np.uint8)
    mean, deviations, axes, bits_of = basis_views(encoded, rows)
    mean[...] = origin
    found = _in_threads(_decompose, products, repeat(count), axes)
    inverse, units, variances = map(np.stack, zip(*found, strict=True))
    # Deviations are at least the float32 rounding error of the mean, so that no component overflows.
    least = max(MIN_DEVIATION, float(np.abs(mean).max()) * float(np.finfo(np.float32).eps))
    exact = np.maximum(np.sqrt(variances / weight), least * units)
    deviations[...] = exact
    shares = np.square(exact / units).reshape(-1)
    for allocation, each in zip(bits_of, (bits, *rows.more_bits), strict=True):
        allocation[...] = allocate(shares, rows.planes(each)).reshape(allocation.shape)
    return encoded, projection_of(encoded, rows, inverse)


def _in_threads(function: Callable[..., Result], *arguments: Iterable[object]) -> list[Result]:
    """Map a function in the threads of POOL. Calls that no thread has started run here: this may be the only thread."""
    first, *calls = zip(*arguments, strict=False)
    pending = [POOL.submit(function, *call) for call in calls]
    results = [function(*first)]
    for call, future in zip(calls, pending, strict=True):
        results.append(function(*call) if future.cancel() else future.result())
    return results


def _decompose(products: np.ndarray, count: float, axes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill in a group's axes as int8, each with a separate unit; return their inverse, units, and variances in units.

    Few operations and little memory: after each operation the thread waits for the GIL, and on some machines allocating
    memory takes longer than filling it. float32 where it loses less than the 8 bits of an axis; NumPy inverts in
    float64.
    """
    eigenvalues, vectors = np.linalg.eigh(products.astype(np.float64))
    vectors = vectors.astype(np.float32)
    units = np.abs(vectors).max(0) / 127
    rounded = vectors / units
    np.rint(rounded, out=rounded)
    axes[...] = rounded.T
    inverse = np.linalg.inv(rounded)
    shares = np.square(inverse @ vectors, out=rounded)  # a sum of squares: a difference would cancel in float32
    variances = shares @ _shrink(eigenvalues, count).astype(np.float32)
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


def _shrink(variances: np.ndarray, count: float) -> np.ndarray:
    """Return variances shrunk towards their mean, more for fewer rows (oracle approximation, Chen et al., 2010).

    So every axis has a deviation above 0: a value that was constant so far may change.
    """
    variances = variances.astype(np.float64).clip(0, np.finfo(np.float32).max)
    size, total, squares = len(variances), variances.sum(), np.square(variances).sum()
    most = (1 - 2 / size) * squares + total**2
    part = most / max(most, (count + 1 - 2 / size) * (squares - total**2 / size), 1e-300)
    return variances + part * (total / size - variances)
