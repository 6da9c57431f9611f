"""The GPU kernels: on a GPU where there is one, else in Triton's interpreter, on small tensors.

The interpreter runs one program after the other in numpy, so the samples are made smaller for it; what it computes is
the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import thinpipe
from tests.codecs.helpers import content
from thinpipe.codecs.kernels import Kernels, cpu, select
from thinpipe.codecs.layout import GAUSS_SEED, header_bytes, packed_bytes

tl = pytest.importorskip("triton.language")
cuda = pytest.importorskip("thinpipe.codecs.kernels.cuda")
launching = sys.modules["thinpipe.codecs.kernels.cuda.launch"]

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    pytest.importorskip("tests.codecs.interpreter").speed_up()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CONTENTS = ("relu6", "outliers", "laplace")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities and NaN in the interpreter


def set_constants(monkeypatch: pytest.MonkeyPatch, **constants: int) -> None:
    """Give constants of the kernels other values, wherever one was imported to."""
    for module in [m for name, m in sys.modules.items() if name.startswith(cuda.__name__)]:
        for name, value in constants.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tl.constexpr(value))


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        set_constants(monkeypatch, SAMPLE=256, SPLITTERS=64, DRAWN_VALUES=128, COPIES=1, MIDDLE=1024, BORDERS=32)
        monkeypatch.setattr(cuda.order, "DIRECT", 3000)


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
    """What to decode into: the interpreter cuts off what bfloat16 has no room for, where a GPU rounds."""
    return x if ON_GPU or x.dtype != torch.bfloat16 else x.float()


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        *(("sort:6+2", name) for name in CONTENTS),
        ("sort:3+1", "relu6"),
        ("fast:6+2", "outliers"),
        ("uniform:8", "laplace"),
        ("sort:3+1+zero", "laplace"),
        ("fast:4+3+zero", "outliers"),
        ("sort:12+4", "relu6"),
        ("sort:2+5", "laplace"),
    ],
)
def test_wires_are_those_of_the_cpu(spec: str, name: str) -> None:
    x = content(name, (5001,))
    wire = encoded(spec, x)
    assert torch.equal(wire, encoded(spec, x, cpu))
    assert torch.equal(decoded(spec, wire, x), decoded(spec, wire, x, cpu))


@pytest.mark.parametrize("bits", [1, 2, 4, 7, 8, 15, 16])  # every plane, alone and behind every other
def test_widths_are_packed_as_on_the_cpu(bits: int) -> None:
    x = content("laplace", (2500,))
    wire = encoded(f"uniform:{bits}", x)
    assert torch.equal(wire, encoded(f"uniform:{bits}", x, cpu))
    assert torch.equal(decoded(f"uniform:{bits}", wire, x), decoded(f"uniform:{bits}", wire, x, cpu))


@pytest.mark.parametrize("bits", [2, 3, 8, 16])
def test_a_level_is_zero(bits: int) -> None:
    spec = f"uniform:{bits}+zero"
    for seed in range(2):
        x = content("laplace", (300,), seed) * (torch.arange(300) % 5 > 0)
        wire = encoded(spec, x)
        assert torch.equal(wire, encoded(spec, x, cpu))
        assert (decoded(spec, wire, x)[x == 0] == 0).all()


@pytest.mark.parametrize("bits", [2, 6])
def test_a_codebook_with_zero(bits: int) -> None:
    spec = f"kmeans:{bits}+zero"
    x = content("laplace", (5000,)) * (torch.arange(5000) % 3 > 0) + 1e-5 * (torch.arange(5000) % 3)
    assert (decoded(spec, encoded(spec, x), x)[x == 0] == 0).all()
    assert squared_error(spec, x) <= 1.02 * squared_error(spec, x, cpu)


def test_a_codebook_with_room_for_zero_gives_up_nothing() -> None:
    x = torch.tensor([-0.5, 1.0])[torch.arange(3000) % 2]
    assert torch.equal(decoded("kmeans:2+zero", encoded("kmeans:2+zero", x), x), x)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        *(("sort:6+2", count) for count in (1, 5, 2048, 2049)),
        ("kmeans:2", 1),
        ("kmeans:2", 2049),
        ("topk:0.3", 1),
        ("topk:0.3", 2049),
    ],
)
def test_any_number_of_values(spec: str, count: int) -> None:
    x = content("laplace", (count,))
    wire = encoded(spec, x)
    if not spec.startswith("kmeans"):  # whose codebooks may differ in the last bits
        assert torch.equal(wire, encoded(spec, x, cpu))
    assert torch.equal(decoded(spec, wire, x), decoded(spec, wire, x, cpu))


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("sort:6+2", torch.float16),
        ("sort:6+2", torch.bfloat16),
        ("sort:6+2", torch.float64),
        ("kmeans:2", torch.bfloat16),
        ("topk:0.1", torch.float16),
        ("topk:0.1", torch.float64),
    ],
    ids=str,
)
def test_other_float_types(spec: str, dtype: torch.dtype) -> None:
    x = content("laplace", (4100,)).to(dtype)
    wire = encoded(spec, x)
    if not spec.startswith("kmeans"):
        assert torch.equal(wire, encoded(spec, x, cpu))
    into = receiving(x)
    assert torch.equal(decoded(spec, wire, into), decoded(spec, wire, into, cpu))


@pytest.mark.parametrize("name", CONTENTS)
def test_the_sample_finds_the_cuts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search through everything, which is right whatever the sample says."""
    if not ON_GPU:

        def forbidden(*args: object) -> None:
            raise AssertionError("a bracket did not hold its cut")

        monkeypatch.setattr(cuda.select, "open_all", forbidden)
    x = content(name, (40_000 if ON_GPU else 9000,))
    assert torch.equal(encoded("sort:4+2", x), encoded("sort:4+2", x, cpu))


@pytest.mark.skipif(ON_GPU, reason="changes a kernel, which only the interpreter notices")
@pytest.mark.parametrize(("spec", "name"), [("sort:4+2", "laplace"), ("sort:3+1", "outliers"), ("topk:0.1", "relu6")])
def test_large_tensors_are_counted_in_a_few_bins_first(spec: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = sys.modules["thinpipe.codecs.kernels.cuda.windows"]
    bins, pick = [], windows._pick
    monkeypatch.setattr(windows, "_pick", lambda *args: (bins.append(int(args[3].handle.data.item())), pick(*args)))
    set_constants(monkeypatch, LARGE=4096, FEW=16)
    x = content(name, (9000,))
    assert torch.equal(encoded(spec, x), encoded(spec, x, cpu))
    assert bins[0] <= windows.DENSE.value < windows.BINS.value


@pytest.mark.skipif(ON_GPU, reason="changes a kernel, which only the interpreter notices")
@pytest.mark.parametrize("sign", [1, -1], ids=["upper ends", "lower ends"])
def test_cuts_at_ends_of_brackets_that_many_values_share(sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each quarter a value of its own that 15 % share, from 2 % before the cut on: so it ends the cut's bracket."""
    monkeypatch.setattr(cuda.select, "open_all", None)
    generator = torch.Generator().manual_seed(0)
    parts = []
    for number, percent in enumerate((23, 10, 10, 12)):  # values between the shared ones, and then one that is shared
        parts += [number + 0.1 + 0.8 * torch.rand(90 * percent, generator=generator)]
        parts += [torch.full((90 * 15,), number + 1.0)] if number < 3 else []
    x = torch.cat(parts)
    x = sign * x[torch.randperm(x.numel(), generator=generator)]
    assert torch.equal(encoded("sort:4+2", x), encoded("sort:4+2", x, cpu))


@pytest.mark.skipif(ON_GPU, reason="changes a kernel, which only the interpreter notices")
def test_zeros_of_both_signs_are_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mask makes them of positive and negative gradients; searching everything for them would be slow."""
    monkeypatch.setattr(cuda.select, "open_all", None)
    x = content("laplace", (9000,)) * (torch.arange(9000) % 4 == 0)
    assert torch.signbit(x[x == 0]).any()
    assert torch.equal(
        decoded("sort:4+2", encoded("sort:4+2", x), x), decoded("sort:4+2", encoded("sort:4+2", x, cpu), x)
    )


@pytest.mark.skipif(ON_GPU, reason="changes a kernel, which only the interpreter notices")
def test_a_cut_next_to_the_greatest_value_is_found_among_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bracket has no upper end, and what fills up the last span is not kept with it."""
    monkeypatch.setattr(cuda.select, "open_all", None)
    x = content("laplace", (9000,))
    assert torch.equal(encoded("topk:0.001", x), encoded("topk:0.001", x, cpu))


@pytest.mark.skipif(ON_GPU, reason="changes a kernel, which only the interpreter notices")
def test_a_least_value_that_many_share_takes_the_read_with_few_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a ReLU: its bracket begins with that value."""
    reading = sys.modules["thinpipe.codecs.kernels.cuda.reading"]
    spans, count = [], reading._count_few
    monkeypatch.setattr(reading, "_count_few", lambda *args: spans.append(1) or count(*args))
    x = content("laplace", (9000,)).relu()
    assert torch.equal(encoded("sort:4+1", x), encoded("sort:4+1", x, cpu))
    assert spans


@pytest.mark.skipif(ON_GPU, reason="changes a kernel, which only the interpreter notices")
def test_without_room_everything_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = watch_searching_everything(monkeypatch)
    monkeypatch.setattr(cuda.order, "slots_per_column", lambda n, programs, cuts: cuda.reading.EACH.value)
    x = content("laplace", (20_000,))
    assert torch.equal(encoded("sort:4+2", x), encoded("sort:4+2", x, cpu))
    assert searched


def watch_searching_everything(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets longer whenever the whole tensor is searched for cuts."""
    searched: list[int] = []
    search = cuda.select.open_all
    monkeypatch.setattr(cuda.select, "open_all", lambda *args: searched.append(1) or search(*args))
    return searched


def few_values() -> Tensor:
    return torch.randint(0, 12, (9000,), generator=torch.Generator().manual_seed(0)) / 7


def cuts_between_many_equal_values() -> Tensor:
    """Behind each of 16 equal parts so many values are equal that its cut is one of them, and all others differ."""
    x = torch.rand(30_000, generator=torch.Generator().manual_seed(0))
    border = (x * 16).round() / 16
    return torch.where((x - border).abs() < 0.0165, border, x)


@pytest.mark.skipif(ON_GPU, reason="changes a kernel, which only the interpreter notices")
@pytest.mark.parametrize(
    ("spec", "make", "everything"),
    [("sort:4+3", few_values, False), ("sort:3+4", cuts_between_many_equal_values, True)],
)
def test_shared_values(
    spec: str, make: Callable[[], Tensor], everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 31 thresholds around what many values share are few enough for one read; more are too many."""
    searched, x = watch_searching_everything(monkeypatch), make()
    wire = encoded(spec, x)
    assert torch.equal(decoded(spec, wire, x), decoded(spec, encoded(spec, x, cpu), x, cpu))
    assert bool(searched) == everything


TILES = [
    "tile:4",
    "tile:1",
    "tile:3/16",
    "tile:5/512",
    "tile:2+zero",
    "tile:2/64+sr+zero",
    "tile:4+rot",
    "tile:8/4096+rot+sr",
]


@pytest.mark.parametrize(
    ("spec", "count"),
    [(spec, 4500) for spec in TILES] + [(spec, count) for spec in ("tile:4", "tile:4+rot") for count in (7, 2048)],
)
def test_tiles_are_those_of_the_cpu(spec: str, count: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * torch.logspace(-42, 37, count)
    assert_tiles_alike(spec, x)


@pytest.mark.parametrize("sign", [1, -1])
def test_tiles_nearly_all_of_one_sign_keep_a_level_for_the_other(sign: int) -> None:
    assert_tiles_alike("tile:2+zero", sign * torch.linspace(-1, 0, 512).where(torch.arange(512) % 256 > 0, 1e-3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_tiles_of_other_float_types(dtype: torch.dtype) -> None:
    assert_tiles_alike("tile:4", torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype))


@pytest.mark.parametrize("spec", ["tile:4", "tile:2+sr+zero", "tile:4+rot"])
def test_a_tile_that_is_not_finite_spoils_itself_alone(spec: str) -> None:
    x = torch.randn(2304, generator=torch.Generator().manual_seed(0))
    x[300], x[2100] = torch.nan, -torch.inf
    x[600:900] = -0.0
    assert_tiles_alike(spec, x)
    spoilt = decoded(spec, encoded(spec, x), x).isnan().view(-1, 256).all(1)
    assert spoilt.nonzero().view(-1).tolist() == [1, 8]


def assert_tiles_alike(spec: str, x: Tensor) -> None:
    wire = encoded(spec, x)
    assert torch.equal(wire, encoded(spec, x, cpu))
    ours, right = decoded(spec, wire, receiving(x)), decoded(spec, wire, receiving(x), cpu)
    assert torch.equal(ours.isnan(), right.isnan())
    assert torch.equal(ours.nan_to_num(0), right.nan_to_num(0))


def assert_gauss_alike(x: Tensor, bits: int, tile: int, channels: int, inner: int, unbiased: bool = False) -> Tensor:
    """Calls of kernels, not of a codec: what the interpreter can encode is too small to have means of many channels."""
    blocks = -(-x.numel() // tile)
    size = header_bytes(channels + blocks + GAUSS_SEED, 2) + packed_bytes(blocks * tile, bits)
    wires = {module: torch.full((size + 1,), 0xA5, dtype=torch.uint8) for module in (cuda, cpu)}
    outs = {module: torch.full((x.numel(),), 12345.0) for module in (cuda, cpu)}
    for module, device in ((cuda, DEVICE), (cpu, torch.device("cpu"))):
        wire, out = wires[module].to(device)[1:], outs[module].to(device)
        module.encode_gauss(x.to(device), wire, bits, tile, channels, inner, unbiased, 0xFEDCBA98)
        module.decode_gauss(wire, out, bits, tile, channels, inner)
        wires[module], outs[module] = wire.cpu(), out.cpu()
    assert torch.equal(wires[cuda], wires[cpu])
    assert torch.equal(outs[cuda].view(torch.int32), outs[cpu].view(torch.int32))
    return outs[cuda]


@pytest.mark.parametrize(
    ("count", "bits", "tile", "channels", "inner"),
    [
        (7, 1, 256, 0, 1),
        (2049, 4, 256, 0, 1),
        (2048, 2, 16, 0, 1),
        (2200, 4, 128, 20, 1),  # means in turn, more than once in a span
        (2100, 3, 256, 2100, 1),  # less than once
        (2304, 2, 256, 768, 1),  # in turns of whole blocks
        (2400, 8, 64, 4, 3),  # of neighbours
        (4120, 5, 128, 2, 2060),  # of runs longer than a span
    ],
)
def test_normal_levels_are_those_of_the_cpu(count: int, bits: int, tile: int, channels: int, inner: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    x[: count // 2] *= torch.logspace(-10, 10, count // 2)
    assert_gauss_alike(x + 3, bits, tile, channels, inner)
    if bits <= 3:
        assert_gauss_alike(x + 3, bits, tile, channels, inner, unbiased=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_normal_levels_of_other_float_types(dtype: torch.dtype) -> None:
    assert_gauss_alike(torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype), 4, 64, 5, 1)


@pytest.mark.parametrize("spec", ["gauss:2/64", "gauss:4/64", "gauss:3/64+unbiased"])
def test_odd_rotated_blocks_are_odd_alone(spec: str) -> None:
    x = torch.randn(640, generator=torch.Generator().manual_seed(0))
    x[10], x[70], x[130], x[192:256], x[256:320] = torch.nan, torch.inf, 1e38, 0.0, 1e-35
    out = decoded(spec, encoded(spec, x), x)
    assert torch.equal(encoded(spec, x), encoded(spec, x, cpu))
    assert out.isnan().view(-1, 64).all(1).tolist() == [True] * 3 + [False] * 7
    assert out[192:320].eq(0).all()
    assert out[320:].isfinite().all()


ODD = {
    "constant": torch.full((4000,), 2.5),
    "zeros": torch.zeros(4000),
    "steps": torch.arange(4000) % 7 - 3.0,
    "denormal": torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 1e-40,
    "huge": torch.linspace(-3, 3, 4000) * 1e38,
    "sorted": torch.arange(4000.0),
    "a gap around zero": torch.cat([torch.full((2000,), -1e30), torch.full((2000,), 1e30)])
    * torch.linspace(1, 2, 4000),
    "one apart": torch.cat([torch.full((3999,), -1.0), torch.tensor([7.0])]),
}


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        *(("sort:5+2", kind) for kind in ODD),
        *(("kmeans:3", kind) for kind in ("constant", "denormal", "huge", "a gap around zero", "one apart")),
        *(("topk:0.2", kind) for kind in ("constant", "steps", "one apart")),
    ],
)
def test_odd_tensors(spec: str, kind: str) -> None:
    x = ODD[kind]
    ours, right = decoded(spec, encoded(spec, x), x), decoded(spec, encoded(spec, x, cpu), x, cpu)
    if spec.startswith("kmeans"):
        assert (ours.double() - x).square().sum() <= 1.01 * (right.double() - x).square().sum()
    else:
        assert torch.equal(ours, right)


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("uniform:8", torch.nan),
        ("sort:6+2", torch.inf),
        ("sort:6+2", -torch.inf),
        ("kmeans:4", torch.nan),
        ("kmeans:4", -torch.inf),
    ],
)
def test_what_is_not_finite_shows(spec: str, value: float) -> None:
    x = content("laplace", (4000,))
    x[1234] = value
    assert decoded(spec, encoded(spec, x), x).isnan().all()


def squared_error(spec: str, x: Tensor, kernels: Kernels = cuda) -> float:
    return (decoded(spec, encoded(spec, x, kernels), x, kernels).double() - x).square().sum().item()


@pytest.mark.parametrize(("bits", "name"), [(1, "laplace"), (4, "relu6"), (4, "outliers")])
def test_small_codebooks_are_as_good_as_on_the_cpu(bits: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        set_constants(monkeypatch, BORDERS=64)
    x = content(name, (8000,))
    assert squared_error(f"kmeans:{bits}", x) <= 1.01 * squared_error(f"kmeans:{bits}", x, cpu)


def test_values_far_from_the_crowd_have_codes_of_their_own() -> None:
    """As where a gradient is clipped: the only borders that matter are those beside the crowd."""
    generator = torch.Generator().manual_seed(0)
    x = 1e-6 * torch.randn(4000, generator=generator)
    x[::20] = 2.0 * torch.randint(0, 2, (200,), generator=generator) - 1
    assert squared_error("kmeans:2", x) <= 1e-6 * x.square().sum()


@pytest.mark.parametrize("name", ["relu6", "outliers"])
def test_large_codebooks_are_better_than_buckets(name: str) -> None:
    x = content(name, (8000,))
    ours = squared_error("kmeans:6", x)
    assert ours < squared_error("sort:6", x, cpu)
    assert ours < squared_error("uniform:6", x, cpu)


@pytest.mark.parametrize("fraction", [0.5, 0.01])
def test_largest_values_with_ties(fraction: float) -> None:
    x = (torch.arange(9000) % 11 - 5).float()
    spec = f"topk:{fraction}"
    wire = encoded(spec, x)
    assert torch.equal(wire, encoded(spec, x, cpu))
    assert torch.equal(decoded(spec, wire, x), decoded(spec, wire, x, cpu))


@pytest.mark.parametrize("spec", ["sort:6+2", "kmeans:4", "topk:0.1", "topk:0.01"])
def test_a_damaged_wire_stays_within_its_arrays(spec: str) -> None:
    x = content("laplace", (5000,))
    wire = encoded(spec, x)
    noise = torch.randint(0, 256, wire.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    room = torch.full((x.numel() + 2,), 12345.0, device=DEVICE)
    thinpipe.codec(spec, kernels=cuda).decode(noise.to(DEVICE), room[1:-1])
    assert room[0] == room[-1] == 12345


def test_a_wire_may_start_anywhere() -> None:
    x = content("laplace", (3000,)).to(DEVICE)
    for spec in ("sort:6+2", "kmeans:4", "topk:0.1"):
        codec = thinpipe.codec(spec, kernels=cuda)
        size = codec.wire_bytes(x.shape, x.dtype)
        buffer = torch.zeros(size + 3, dtype=torch.uint8, device=DEVICE)
        codec.encode(x, out=buffer[3:])
        assert torch.equal(buffer[3:].cpu(), encoded(spec, x.cpu()))
        out = torch.empty_like(x)
        codec.decode(buffer[3:], out)
        assert torch.equal(out.cpu(), decoded(spec, buffer[3:].cpu(), x.cpu(), cpu))


def test_places_in_memory_do_not_overlap() -> None:
    places = cuda.memory.Map()
    assert [places.take(3).value, places.take(5, align=4).value, places.take(1).value] == [0, 4, 9]
    assert places.size == 10


def test_without_triton_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="Triton, which is not installed"):
        select("auto", torch.device("cuda"))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("spec", ["sort:6+2", "uniform:8", "kmeans:4"])
def test_encoding_and_decoding_inside_a_cuda_graph(spec: str) -> None:
    codec = thinpipe.codec(spec)
    x = content("relu6", (300_000,)).to(DEVICE)
    wire, out = codec.encode(x), torch.empty_like(x)
    codec.decode(wire, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.encode(x, out=wire)
        codec.decode(wire, out)
    x.copy_(content("laplace", (300_000,), seed=3))
    graph.replay()
    assert torch.equal(wire, codec.encode(x))
    assert torch.equal(out, codec.decode(wire, torch.empty_like(x)))


class FakeKernel:
    """Notes what is compiled and run."""

    def __init__(self, name: str, log: list[str], seconds: float = 0) -> None:
        self.__name__, self.log, self.seconds = name, log, seconds

    def warmup(self, *arguments: object, grid: tuple[int], **options: object) -> FakeKernel:
        self.log.append(f"compile {self.__name__}")
        time.sleep(self.seconds)
        return self

    function, packed_metadata = "the code on the GPU", "its threads"

    def run(self, x: int, y: int, z: int, stream: int, *arguments: object) -> None:
        *given, address, number = arguments
        assert given == [self.function, self.packed_metadata, None, None, None]
        assert isinstance(address, int)
        self.log.append(f"run {self.__name__} {x} with {number} on {stream}")


@pytest.fixture
def without_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Launches as on a GPU, with what is compiled forgotten, and locks in a folder of the test's own."""
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=5))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.skipif(ON_GPU, reason="without a GPU as on one")
def test_kernels_of_a_call_are_compiled_before_any_runs(without_interpreter: None) -> None:
    log: list[str] = []
    first, second = FakeKernel("first", log), FakeKernel("second", log)
    launches = [launching.Launch(kernel, 3, (torch.zeros(4), 7)) for kernel in (first, second, first)]
    launching.launch(*launches)
    assert sorted(log[:2]) == ["compile first", "compile second"]
    assert log[2:] == ["run first 3 with 7 on 5", "run second 3 with 7 on 5", "run first 3 with 7 on 5"]
    launching.launch(launches[1])
    assert log[5:] == ["run second 3 with 7 on 5"]


@pytest.mark.skipif(ON_GPU, reason="without a GPU as on one")
def test_a_long_compilation_is_announced(
    without_interpreter: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launching, "SILENT_S", 0.01)
    launching.launch(launching.Launch(FakeKernel("slow_kernel", [], seconds=0.3), 1, (torch.zeros(4), 7)))
    assert capsys.readouterr().err == "thinpipe: compiling for the GPU, once on this machine: slow_kernel\n"
