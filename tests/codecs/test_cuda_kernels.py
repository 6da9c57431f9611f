"""The GPU kernels: on a GPU where there is one, else in Triton's interpreter, on small tensors."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch import Tensor

import thinpipe
from tests.codecs.gpu import CONTENTS, DEVICE, MARKS, ON_GPU, cuda, decoded, encoded, receiving, set_constants
from tests.codecs.helpers import content
from thinpipe.codecs.gauss import Gauss
from thinpipe.codecs.golomb_rice import TURNS, allot, sections
from thinpipe.codecs.kernels import Kernels, cpu, select
from thinpipe.codecs.layout import GAUSS_SEED, header_bytes

pytestmark = MARKS


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


def test_a_codebook_with_an_unused_entry_for_zero_loses_nothing() -> None:
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


def assert_gauss_alike(x: Tensor, spec: str, channels: int, inner: int) -> Tensor:
    """Calls of kernels, not of a codec: what the interpreter can encode is too small to have means of many channels."""
    codec = thinpipe.codec(spec)
    assert isinstance(codec, Gauss)
    blocks = -(-x.numel() // codec.tile)
    without = codec.wire_bytes(x.shape, torch.float32)
    size = without + header_bytes(channels + blocks + GAUSS_SEED, 2) - header_bytes(blocks + GAUSS_SEED, 2)
    wires = {module: torch.full((size + 1,), 0xA5, dtype=torch.uint8) for module in (cuda, cpu)}
    outs = {module: torch.full((x.numel(),), 12345.0) for module in (cuda, cpu)}
    numbers = (math.floor(8 * codec.bits * blocks),) if codec.coded else (int(codec.bits), codec.tile)
    for module, device in ((cuda, DEVICE), (cpu, torch.device("cpu"))):
        wire, out = wires[module].to(device)[1:], outs[module].to(device)
        encode = module.encode_coded if codec.coded else module.encode_gauss
        decode = module.decode_coded if codec.coded else module.decode_gauss
        encode(x.to(device), wire, *numbers, channels, inner, codec.unbiased, 0xFEDCBA98)
        decode(wire, out, *numbers, channels, inner)
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
        (440, 4, 64, 0, 1),  # the seed and 14 bytes fill up the header
        (2200, 4, 128, 20, 1),  # means in turn, more than once in a span
        (2100, 3, 256, 2100, 1),  # less than once
        (2304, 2, 256, 768, 1),  # in turns of complete blocks
        (2400, 8, 64, 4, 3),  # of neighbours
        (4120, 5, 128, 2, 2060),  # of runs longer than a span
    ],
)
def test_normal_levels_are_those_of_the_cpu(count: int, bits: int, tile: int, channels: int, inner: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    x[: count // 2] *= torch.logspace(-10, 10, count // 2)
    for option in ("", "+unbiased"):
        assert_gauss_alike(x + 3, f"gauss:{bits}/{tile}{option}", channels, inner)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_normal_levels_of_other_float_types(dtype: torch.dtype) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_gauss_alike(x, "gauss:4/64", 5, 1)
    assert_gauss_alike(x, "gauss:2.5+coded+unbiased", 5, 1)


@pytest.mark.parametrize(
    ("count", "bits", "channels", "inner"),
    [
        (7, 1, 0, 1),
        (1025, 1.5, 0, 1),
        (1200, 2.5, 20, 1),  # means as above
        (1100, 3.35, 1100, 1),
        (1536, 5, 768, 1),
        (1200, 8, 4, 3),
        (1040, 2.1, 2, 520),
    ],
)
def test_coded_blocks_are_those_of_the_cpu(count: int, bits: float, channels: int, inner: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    x[: count // 2] *= torch.logspace(-5, 3, count // 2)
    x[256:512] = 100.0 * (torch.arange(len(x[256:512])) == 7)  # rotated, all are of one magnitude
    for option in ("", "+unbiased"):
        assert_gauss_alike(x + 3 * (channels > 0), f"gauss:{bits}+coded{option}", channels, inner)


@pytest.mark.parametrize("per_block", [8, 8.7, 19, 40, 64])
def test_sizes_of_many_coded_blocks(per_block: float) -> None:
    energies = torch.randint(0, 21344, (5000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    energies[1000:] = energies[1000:] % 500 + 9000
    turned, budget = energies + torch.arange(5000, dtype=torch.int32) % TURNS, int(per_block * 5000)
    counts = torch.bincount(turned, minlength=cuda.rice_code.ENERGIES.value).int()
    assert torch.equal(cuda.allot_coded(turned.to(DEVICE), counts.to(DEVICE), budget).cpu(), allot(energies, budget))


def test_a_damaged_coded_wire_is_read_as_by_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 256, generator=generator) * torch.logspace(-2, 1, 6)[:, None]
    right = encoded("gauss:3+coded", x, cpu)
    noise = torch.randint(0, 256, right.shape, dtype=torch.uint8, generator=generator)
    header, payload = sections(6, 0)
    full = torch.full_like(noise, 255)
    for damage, start in ((noise, header), (noise, payload), (full, header), (full, payload), (full, 0)):
        wire = torch.cat([right[:start], damage[start:]])
        ours, theirs = (decoded("gauss:3+coded", wire, x, kernels) for kernels in (cuda, cpu))
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(0), theirs.nan_to_num(0))


@pytest.mark.parametrize("spec", ["gauss:2/64", "gauss:4/64", "gauss:3/64+unbiased", "gauss:3+coded+unbiased"])
def test_odd_rotated_blocks_are_odd_alone(spec: str) -> None:
    x = torch.randn(10, 256 if "coded" in spec else 64, generator=torch.Generator().manual_seed(0))
    x[0, 10], x[1, 6], x[2, 2], x[3], x[4] = torch.nan, torch.inf, 1e38, 0.0, 1e-35
    out = decoded(spec, encoded(spec, x), x)
    assert torch.equal(encoded(spec, x), encoded(spec, x, cpu))
    assert out.isnan().all(1).tolist() == [True] * 3 + [False] * 7
    assert out[3:5].eq(0).all()
    assert out[5:].isfinite().all()


ODD = {
    "constant": torch.full((4000,), 2.5),
    "zeros": torch.zeros(4000),
    "steps": torch.arange(4000) % 7 - 3.0,
    "denormal": torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 1e-40,
    "huge": torch.linspace(-3, 3, 4000) * 1e38,
    "sorted": torch.arange(4000.0),
    "a gap around zero": torch.cat([torch.full((2000,), -1e30), torch.full((2000,), 1e30)])
    * torch.linspace(1, 2, 4000),
    "one apart": torch.cat([torch.full((3999,), 1.0), torch.tensor([7.0])]),
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
def test_non_finite_values_are_visible(spec: str, value: float) -> None:
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
    """As where a gradient is clipped: the only borders that matter are those next to the crowd."""
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
    places = cuda.offsets.Map()
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
