"""Loops that several processes compile at once, as workers of one machine do in their first run."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numba.core import caching

from tests.preloaded import Program
from thinpipe.codecs.kernels.cpu.compiling import jit

LOOP = """
import time

import numpy as np
from numba.core import caching

from thinpipe.codecs.kernels.cpu.compiling import jit

load = caching.IndexDataCacheFile._load_index


def load_slowly(self):
    found = load(self)
    time.sleep(1)
    return found


caching.IndexDataCacheFile._load_index = load_slowly


@jit
def last(x):
    return x[x.size - 1]


def check(*types):
    for each in types:
        assert last(np.array([1, 2, 3], each)) == 3
    return sum(last.stats.cache_hits.values())
"""


def test_on_a_full_disk_a_loop_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def save(*_: object) -> None:
        refused.append(True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", save)
    monkeypatch.setattr(caching.IndexDataCacheFile, "load", lambda *_: None)

    @jit
    def last(x):  # type: ignore[no-untyped-def]
        return x[x.size - 1]

    assert last(np.arange(3)) == 2
    assert refused


def test_two_processes_that_compile_at_once_keep_both_results(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)

    def start(*types: str) -> Program:
        # As a new process would find it: numba reads the variable NUMBA_CACHE_DIR when it is imported.
        settings = f"numba.config.CACHE_DIR = {str(tmp_path / 'kept')!r}; compiling.folder.cache_clear()"
        program = f"import sys, numba; from thinpipe.codecs.kernels.cpu import compiling; {settings}; "
        program += f"sys.path.insert(0, {str(tmp_path)!r}); import loop; print(loop.check(*{types}))"
        return Program("-c", program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    both = [start(each) for each in ("int16", "float32")]
    assert [each.communicate(timeout=100)[0] for each in both] == ["0\n", "0\n"]
    assert start("int16", "float32").communicate(timeout=100)[0] == "2\n"
