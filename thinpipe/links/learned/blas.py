"""NumPy's linear algebra on the thread that calls it.

OpenBLAS, which NumPy's wheels have, spreads even a matrix of a few hundred columns over all cores, and waits for them
again and again while it factorizes. Where other work has those cores, as in training, that takes many times as long:
eigenvectors of two matrices of 384 in 26 ms on one thread, in 54 to 4600 on two, of two cores that others used as well.
On one thread results are also the same on every number of cores.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController

_lock = threading.Lock()
_inside, _before = 0, 0  # threads that are, and what there was before


@contextmanager
def one_thread() -> Iterator[None]:
    """For all of the process, since OpenBLAS knows nothing less, until the last one leaves."""
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
    """NumPy's own OpenBLAS, and no library that torch computes with; None where NumPy has another."""
    libraries = ThreadpoolController().lib_controllers
    return next((each for each in libraries if each.internal_api == "openblas" and "numpy" in each.filepath), None)
