"""The machinery of the CPU kernels: order statistics on any sample, threads, forks, bounds, memory."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinpipe
from tests.codecs.helpers import SPECS, content
from thinpipe.codecs.kernels.cpu import compiling, order
from thinpipe.codecs.kernels.cpu.codebook import FEW, groups_of
from thinpipe.codecs.kernels.cpu.loops import tiles
from thinpipe.codecs.kernels.cpu.loops.count import count_and_gather
from thinpipe.codecs.kernels.cpu.order import key_floats
from thinpipe.codecs.kernels.cpu.threads import shares
from thinpipe.codecs.layout import BLOCK

LARGE = (8, 32, 112, 112)  # 12.8 MB of float32: every thread has work, samples are small parts


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    distinct=st.sampled_from([1, 2, 5, 300, 10**9]),
    count=st.integers(9000, 60_000),
    quantiles=st.lists(st.floats(0, 1), min_size=1, max_size=40),
)
def test_order_statistics_are_those_of_a_sort(seed, distinct, count, quantiles):
    generator = np.random.default_rng(seed)
    x = (generator.integers(0, distinct, count) - distinct // 2).astype(np.float32)
    ranks = np.unique([round(quantile * (count - 1)) for quantile in quantiles])
    low, high, found = order.order_statistics(x, ranks)
    ordered = np.sort(x)
    assert np.array_equal(key_floats(found), ordered[ranks])
    assert np.array_equal(key_floats(np.array([low, high])), ordered[[0, -1]])


@pytest.mark.parametrize("direction", [1, -1], ids=["rising", "falling"])
def test_values_in_order_need_no_wider_brackets(monkeypatch, direction):
    """All values near a cut lie in one thread's share: there must be room for them."""
    x = np.linspace(-1, 1, 3_000_000, dtype=np.float32)[::direction].copy()
    sizes = []
    monkeypatch.setattr(order, "read", lambda *args, read=order.read: sizes.append(len(args[0])) or read(*args))
    ranks = np.array([10, 1_000_000, 2_999_000])
    assert np.array_equal(key_floats(order.order_statistics(x, ranks)[2]), np.sort(x)[ranks])
    assert sizes.count(len(x)) == 1


@pytest.mark.parametrize(("room", "kept"), [(101, 100), (100, -1), (3, -1)])
def test_keys_are_kept_only_within_capacity(room, kept):
    """One place more than there are keys; where there is not, nothing behind the last place is written."""
    memory = np.full(130, 12345, np.int32)
    everything = np.array([[order.LOWEST, order.HIGHEST]], np.int32)
    x, bounds, below = np.arange(100, dtype=np.float32), np.array([0], np.int32), np.zeros(1, np.int64)
    _, _, found = count_and_gather(x, 0, 1, False, bounds, everything, below, memory[:room])
    assert found == kept
    assert (memory[room:] == 12345).all()


def test_a_codebook_counts_every_value_once():
    """Also where the last block is short: what lay far out in the one before it is not found there again."""
    x = np.random.default_rng(0).normal(size=FEW + BLOCK + 1).astype(np.float32)
    x[-9:-1] = 100
    assert groups_of(x)[3].sum() == x.size


@pytest.mark.parametrize("unfair", ["lowest", "highest", "one-value"])
def test_order_statistics_survive_a_sample_that_misleads(monkeypatch, unfair):
    """Brackets that miss their ranks are widened until they hold them."""
    x = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    honest, calls = order.sample, []

    def misleading(values, size, magnitude=False):
        calls.append(size)
        keys = honest(values, size, magnitude)
        if len(calls) > 1:
            return keys
        chosen = {"lowest": np.sort(keys)[: len(keys) // 10], "highest": np.sort(keys)[-len(keys) // 10 :]}
        return chosen.get(unfair, np.full_like(keys, keys[0]))

    monkeypatch.setattr(order, "sample", misleading)
    ranks = np.array([10, 25_000, 49_000])
    assert np.array_equal(key_floats(order.order_statistics(x, ranks)[2]), np.sort(x)[ranks])


SHARED = [  # one for each way to share the work
    "uniform:8",
    "sort:6+2",
    "sort:3+8",
    "sort:3+1+zero",
    "kmeans:4",
    "kmeans:7",
    "tile:4",
    "tile:5/4096",
    "tile:6/512+rot+sr",
    "tile:8/32+sr+zero",
    "topk:0.1",
    "topk:0.01",
]


@pytest.mark.parametrize("spec", SHARED)
def test_the_wire_does_not_depend_on_the_number_of_threads(spec):
    x = content("relu6", LARGE)
    codec = thinpipe.codec(spec)
    threads = torch.get_num_threads()
    try:
        wires, decoded = [], []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            assert len(shares(x.view(-1).numpy())) == min(count, 6)
            wires.append(codec.encode(x))
            decoded.append(codec.decode(wires[0], torch.empty_like(x)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(wire, wires[0]) for wire in wires)
    assert all(torch.equal(values, decoded[0]) for values in decoded)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_several_python_threads_may_encode_at_once():
    tensors = [content("laplace", LARGE, seed) for seed in range(4)]
    codec = thinpipe.codec("sort:6+2")
    expected = [codec.encode(x) for x in tensors]
    with ThreadPoolExecutor(4) as pool:
        wires = list(pool.map(codec.encode, tensors))
    assert all(torch.equal(*pair) for pair in zip(wires, expected, strict=True))


@pytest.mark.usefixtures("two_threads")
def test_a_forked_process_may_encode_too():
    """A data loader's workers are forks; the parent's threads do not exist in them."""
    x = content("relu6", LARGE)
    codec = thinpipe.codec("sort:6+2")
    expected = codec.encode(x)
    wire = torch.empty_like(expected).share_memory_()
    child = multiprocessing.get_context("fork").Process(target=codec.encode, args=(x, wire))
    child.start()
    child.join(60)
    alive = child.is_alive()
    child.kill()
    assert not alive
    assert torch.equal(wire, expected)


def run(code: str, **environment: str) -> list[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "2"} | environment
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


PEAKS = """
from tests.codecs.helpers import content
import thinpipe
from thinpipe.lab.bench.meter import peak_extra_bytes
for kind in ("relu6", "laplace"):
    x = content(kind, LARGE)
    for spec in SPECS:
        codec = thinpipe.codec(spec)
        wire = codec.encode(x)
        print(kind + "," + spec, peak_extra_bytes(lambda: codec.encode(x, out=wire)) / (x.numel() * x.itemsize))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from Linux")
def test_encoding_needs_less_than_a_quarter_of_the_tensor():
    """In a process of its own: the peak is that of the process, and other tests' memory would count."""
    specs = ["uniform:8", "sort:6+2", "fast:12+4", "kmeans:4", "kmeans:8", "tile:2/16+rot+sr", "topk:0.1"]
    fields = run(PEAKS.replace("LARGE", repr(LARGE)).replace("SPECS", repr(specs)))
    peaks = dict(zip(fields[::2], map(float, fields[1::2]), strict=True))
    assert len(peaks) == 2 * len(specs)
    assert {spec: peak for spec, peak in peaks.items() if peak >= 0.25} == {}


def test_loops_compile_without_a_writable_cache():
    """No folder can be written to, neither the package's nor the user's."""
    code = """
import tempfile
def forbidden(**_): raise PermissionError
tempfile.TemporaryFile = forbidden
from thinpipe.codecs.kernels.cpu.loops import kmeans
print(kmeans.lloyd.stats.cache_path)
"""
    assert run(code) == ["None"]


def test_compiled_loops_are_cached_by_a_hash_of_all_their_sources(tmp_path):
    """A loop calls others of other files and has constants of layout.py in it: either may change without its own."""
    files = [tmp_path / "layout.py", tmp_path / "pack.py"]
    for path in files:
        path.write_text("BLOCK = 2048")
    before = compiling.digest(files)
    assert compiling.digest(files) == before
    files[0].write_text("BLOCK = 4096")
    assert compiling.digest(files) != before
    kept_in = compiling.folder()
    assert kept_in is not None
    assert Path(tiles.encode_tiles.stats.cache_path).parent == kept_in


def test_another_process_finds_the_compiled_loops(tmp_path):
    code = """
import torch, thinpipe
from thinpipe.codecs.kernels.cpu.loops.pack import look_up
codec = thinpipe.codec("uniform:3")
codec.decode(torch.zeros(codec.wire_bytes((9,), torch.float32), dtype=torch.uint8), torch.empty(9))
print(sum(look_up.stats.cache_hits.values()), sum(look_up.stats.cache_misses.values()))
"""
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["0", "1"]
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["1", "0"]


BOUNDS_CHECK = """
import torch, thinpipe
for spec in SPECS:
    codec = thinpipe.codec(spec)
    for count in (1, 9, 2047, 2049, 70_001):
        for x in (torch.randn(count), torch.randn(count).clamp(0, 6), torch.zeros(count)):
            wire = codec.encode(x)
            codec.decode(wire, torch.empty_like(x))
            codec.decode(torch.randint(0, 256, wire.shape, dtype=torch.uint8), torch.empty_like(x))
print("checked", len(SPECS))
"""


def test_no_loop_leaves_its_arrays():
    """The same loops compiled with bounds checks, which raise: on tensors, and on wires of noise.

    Of one type: loops have the same places in all of them, and are compiled for each. Cached as the others are, by the
    same rule, since compiling takes half a minute.
    """
    kept_in = compiling.folder().parent / "bounds-checked"
    done = run(BOUNDS_CHECK.replace("SPECS", repr(SPECS)), NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(kept_in))
    assert done == ["checked", str(len(SPECS))]
