"""A context manager that limits NumPy's linear algebra to the calling thread.

OpenBLAS, which NumPy's wheels contain, distributes even a matrix of a few hundred columns over all cores and
synchronizes them repeatedly while it factorizes. If other work uses those cores, as in training, that is many times
slower: eigenvectors of two 384 x 384 matrices took 26 ms on one thread and 54 to 4600 ms on two, on two cores that were
also used by other work. On one thread, results also do not depend on the number of cores.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController

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
