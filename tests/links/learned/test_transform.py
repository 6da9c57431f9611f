"""Rows, axes, bits: what axes:B does with a tensor once it has learned."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from thinpipe.codecs.kernels import Kernels, reference, select
from thinpipe.codecs.normal import boundaries, distortion, levels
from thinpipe.links.learned import learner as learning
from thinpipe.links.learned import transform as wires
from thinpipe.links.learned.learner import BasisLearner, fill_moments, stride_of
from thinpipe.links.learned.pca import allocate
from thinpipe.links.learned.row_layout import BASIS_SHARE, MAX_AXES, MAX_INTERVAL, MIN_INTERVAL, Rows, rows_of
from thinpipe.links.learned.transform import Basis, decode, encode

SHAPES = [(2048, 96), (16, 128, 64), (8, 16, 32, 32), (8, 3, 16, 16), (4, 7, 7, 64), (8, 40, 5, 3), (64, 1009)]


def correlated(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Rows along the last dimension that vary mostly along few axes, and not around zero."""
    draw = torch.Generator().manual_seed(1)
    width = shape[-1]
    axes = torch.linalg.qr(torch.randn(width, width, generator=draw)).Q
    deviations = torch.arange(1, width + 1) ** -0.7
    mean = 3 * torch.randn(width, generator=draw)
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 2))
    return rows * deviations @ axes.T + mean


def learned(x: Tensor, bits: float, chunks: int = 8) -> tuple[Rows, Basis]:
    rows = rows_of(x.shape, bits, chunks)
    assert rows is not None
    learner = BasisLearner({}, rows, bits)
    learner.add(rows.columns(x))
    learner.fold()
    learner.start()
    encoded, projection = learner.take()
    assert len(encoded) == rows.basis_bytes
    return rows, Basis.read(encoded, rows, bits, projection)


def round_trip(x: Tensor, rows: Rows, basis: Basis, bits: float) -> Tensor:
    wire = torch.full((rows.wire_bytes(bits),), 0xAA, dtype=torch.uint8, device=x.device)
    encode(rows.columns(x), basis, rows, wire)
    out = torch.full_like(x, torch.nan)
    decode(wire, basis, rows, out)
    return out


def error(out: Tensor, x: Tensor) -> float:
    x = x.float()
    return float((out.float() - x).square().sum() / (x - x.flatten(0, -2).mean(0)).square().sum())


@pytest.mark.parametrize("chunks", [1, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_is_its_rows(shape: tuple[int, ...], chunks: int) -> None:
    rows = rows_of(shape, 2, chunks)
    assert rows is not None
    x = torch.randn(shape)
    columns, out = rows.columns(x), torch.empty(shape)
    assert columns.shape == (rows.groups, rows.size, rows.count)
    rows.restore(columns, out)
    torch.testing.assert_close(out, x)
    assert float(columns.square().sum()) == pytest.approx(float(x.square().sum()), rel=1e-5)


def test_which_rows_shapes_have() -> None:
    found = {
        shape: rows_of(shape, 2, 8)
        for shape in (
            *((64, 16, 32, 32), (2, 16, 8, 8), (64, 448, 1, 1), (4, 7, 7, 768), (4, 256, 4096)),
            *((9,), (9, 3), (0, 64)),
        )
    }
    text = {shape: rows and (rows.width, rows.groups, rows.block, rows.rotated) for shape, rows in found.items()}
    assert text == {
        (64, 16, 32, 32): (256, 1, 4, False),  # squares of 4 x 4 pixels and 16 channels: 256 axes
        (2, 16, 8, 8): (256, 8, 4, True),  # of few rows a matrix of 256 axes would be too much to tell
        (64, 448, 1, 1): (448, 2, 1, False),
        (4, 7, 7, 768): (768, 2, 0, False),  # channels last
        (4, 256, 4096): (4096, 8, 0, False),
        (9,): None,
        (9, 3): None,
        (0, 64): None,
    }


@pytest.mark.parametrize("bits", [0.5, 1, 2.5, 8])
@pytest.mark.parametrize("shape", [(16, 128, 768), (8, 64, 4096), (4, 64, 56, 56), (2, 4, 32)], ids=str)
def test_updates_are_small_and_the_basis_stays_current(shape: tuple[int, ...], bits: float) -> None:
    rows = rows_of(shape, bits, 4)
    assert rows is not None
    every = rows.every(bits, 4)
    assert rows.size <= MAX_AXES
    assert rows.basis_bytes / every <= BASIS_SHARE * 4 * rows.wire_bytes(bits)
    assert every >= MIN_INTERVAL
    assert every <= MAX_INTERVAL or rows.size <= 16
    per_value = 8 * rows.wire_bytes(bits) / math.prod(shape)
    assert bits - 8 / rows.width <= per_value <= bits + 16 / rows.width + 8 * bits / rows.count


@pytest.mark.parametrize("bits", [0.5, 1, 2, 3.25, 4, 6])
def test_error_of_normal_rows_follows_their_variances(bits: float) -> None:
    x, later = correlated((4096, 96)), correlated((4096, 96), seed=9)
    rows, basis = learned(x, bits)
    assert int(basis.bits.sum()) == math.floor(bits * 96)
    variances = torch.arange(1, 97).double() ** -1.4
    chosen = allocate(variances.numpy(), math.floor(bits * 96))
    expected = float((variances * torch.tensor([distortion(int(each)) for each in chosen])).sum() / variances.sum())
    assert 0.85 * expected < error(round_trip(later, rows, basis, bits), later) < 1.15 * expected


def test_two_bits_lose_less_than_those_of_other_codecs() -> None:
    import thinpipe

    x, later = correlated((4096, 96)), correlated((4096, 96), seed=9)
    rows, basis = learned(x, 2)
    ours = error(round_trip(later, rows, basis, 2), later)
    for spec in ("tile:4", "kmeans:4"):
        other = thinpipe.codec(spec)
        assert ours < error(other.decode(other.encode(later), torch.empty_like(later)), later)


@pytest.mark.parametrize("shape", [(64, 16, 16), (32, 16, 32, 32), (40, 49, 16), (4096, 16)], ids=str)
def test_all_places_of_samples_are_learned_from(shape: tuple[int, ...]) -> None:
    """Not the first token of each, or the left border of a picture, as a stride that divides a row of them would."""
    rows = rows_of(shape, 2, 4)
    assert rows is not None
    stride, places = stride_of(rows, 4), rows.count // shape[0]
    assert stride > 1
    taken = torch.bincount(torch.arange(0, rows.count, stride) % places, minlength=places)
    assert int(taken.max() - taken.min()) <= 1


def test_bits_are_those_of_the_greedy_choice() -> None:
    variances = torch.rand(37, generator=torch.Generator().manual_seed(0)).double() ** 6
    for total in (0, 5, 37, 200, 8 * 37):
        queue = [(-float(v) * (distortion(0) - distortion(1)), i, 0) for i, v in enumerate(variances)]
        heapq.heapify(queue)
        expected = [0] * 37
        for _ in range(total):
            _, i, has = heapq.heappop(queue)
            expected[i] = has + 1
            if has + 1 < 8:
                gain = float(variances[i]) * (distortion(has + 1) - distortion(has + 2))
                heapq.heappush(queue, (-gain, i, has + 1))
        assert allocate(variances.numpy(), total).tolist() == expected
    assert int(allocate(np.zeros(37), 100).sum()) == 100  # nothing varied


def test_an_outlier_spoils_its_row_alone_and_not_much() -> None:
    x = correlated((1024, 64))
    rows, basis = learned(x, 4)
    later = correlated((1024, 64), seed=9)
    usual = error(round_trip(later, rows, basis, 4), later)
    later[5] += 1000 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    out = round_trip(later, rows, basis, 4)
    rest = torch.arange(1024) != 5
    assert error(out[rest], later[rest]) == pytest.approx(usual, rel=0.05)
    assert float((out[5] - later[5]).norm() / later[5].norm()) < 0.6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_stay_in_their_row_and_are_not_learned(bad: float) -> None:
    x = correlated((512, 64))
    rows, basis = learned(x, 2)
    x[7, 3] = bad
    out = round_trip(x, rows, basis, 2)
    assert not out[7].isfinite().any()
    assert out[torch.arange(512) != 7].isfinite().all()
    learner = BasisLearner({}, rows, 2)
    for step in (x, correlated((512, 64)), x):
        learner.add(rows.columns(step))
        learner.fold()
    untouched = BasisLearner({}, rows, 2)
    untouched.state["origin"] = learner.state["origin"]
    for name in ("moments", "weight"):
        untouched.state[name] = torch.zeros_like(learner.state[name])
    untouched.add(rows.columns(correlated((512, 64))))
    untouched.fold()
    assert all(torch.equal(untouched.state[name], each) for name, each in learner.state.items())
    assert all(each.isfinite().all() for each in learner.state.values())


@pytest.mark.parametrize("fill", [0.0, -3.0, 1e30, 1e-30])
def test_tensors_that_do_not_vary_come_back(fill: float) -> None:
    x = torch.full((256, 64), fill)
    rows, basis = learned(x, 2)
    torch.testing.assert_close(round_trip(x, rows, basis, 2), x)


def test_a_value_that_was_constant_may_change() -> None:
    x = correlated((1024, 64))
    x[:, 9] = 2.0
    rows, basis = learned(x, 3)
    later = correlated((1024, 64), seed=9)
    usual = error(round_trip(later.index_fill(1, torch.tensor([9]), 2.0), rows, basis, 3), later)
    later[:, 9] = 2.0 + 0.1 * torch.randn(1024, generator=torch.Generator().manual_seed(0))
    assert error(round_trip(later, rows, basis, 3), later) < 2 * usual + 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats(dtype: torch.dtype) -> None:
    x = correlated((1024, 64))
    rows, basis = learned(x, 3)
    out = round_trip(x.to(dtype), rows, basis, 3)
    assert out.dtype == dtype
    assert error(out, x) == pytest.approx(error(round_trip(x, rows, basis, 3), x), rel=0.2)


@pytest.mark.parametrize("shape", [(256, 64), (2, 16, 8, 8)], ids=str)  # the other one has rotated squares
def test_nothing_is_rounded_for_a_stage_that_computes_in_bfloat16(shape: tuple[int, ...]) -> None:
    x = correlated(shape)
    rows, basis = learned(x, 3)
    out = round_trip(x, rows, basis, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, again = learned(x, 3)
        assert torch.equal(again.reconstruction, basis.reconstruction)
        assert torch.equal(round_trip(x, rows, again, 3), out)


def step_of(kind: str, step: int) -> Tensor:
    """A thousand rows whose values have deviations of about 0.2."""
    x = correlated((1024, 96), seed=step)
    if kind == "large channel":
        x[:, 5] *= 100
    elif kind == "far mean":
        x += 1000
    elif kind == "mean that moves":
        x += 20 * min(step, 5)
    elif kind == "constants that move":
        x[:, ::3] = min(step, 5) * torch.arange(32.0)
    return x


@pytest.mark.parametrize(("bits", "more"), [(2, 0.01), (8, 0.03)])
@pytest.mark.parametrize("kind", ["usual", "large channel", "far mean", "mean that moves", "constants that move"])
def test_moments_of_bfloat16_find_axes_as_good(
    kind: str, bits: int, more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU takes them: values are rounded, and their products are not."""
    rows, errors = Rows(torch.Size((1024, 96)), 2, 48), []

    def rounded(flat: Tensor, columns: Tensor, origin: Tensor, rows: Rows) -> None:
        fill_moments(flat, (columns - origin).bfloat16().float(), torch.zeros_like(origin), rows)

    for each in (fill_moments, rounded):
        monkeypatch.setattr(learning, "fill_moments", each)
        learner = BasisLearner({}, rows, bits)
        for step in range(60):
            learner.add(rows.columns(step_of(kind, step)))
            learner.fold()
            if step % 5 == 4:
                learner.start()
                encoded, projection = learner.take()
        x = step_of(kind, 60)
        errors.append(error(round_trip(x, rows, Basis.read(encoded, rows, bits, projection), bits), x))
    assert errors[0] < (0.1 if bits == 2 else 1e-3)
    assert errors[1] == pytest.approx(errors[0], rel=more)


def test_around_another_origin_the_same_is_learned() -> None:
    rows, x = Rows(torch.Size((1024, 96)), 2, 48), correlated((1024, 96), seed=9)
    found = []
    for centers in (False, True):
        learner = BasisLearner({}, rows, 4)
        for seed in range(3):
            learner.add(rows.columns(correlated((1024, 96), seed)))
            learner.fold()
            if centers:
                before = learner.state["origin"]
                learner.center()
                assert not torch.equal(learner.state["origin"], before)
        learner.start()
        encoded, projection = learner.take()
        found.append(round_trip(x, rows, Basis.read(encoded, rows, 4, projection), 4))
    assert error(found[1], x) == pytest.approx(error(found[0], x), rel=1e-3)


def test_any_bytes_decode_to_something() -> None:
    draw = torch.Generator().manual_seed(0)
    for seed in range(20):
        rows = rows_of((40, 48), 1.5, 8)
        assert rows is not None
        encoded = torch.randint(256, (rows.basis_bytes,), dtype=torch.uint8, generator=draw)
        wire = torch.randint(256, (rows.wire_bytes(1.5),), dtype=torch.uint8, generator=draw)
        out = torch.full((40, 48), 7.0)
        decode(wire, Basis.read(encoded, rows, 1.5), rows, out)
        assert not (out == 7.0).any(), seed


def kernels_of(machine: str) -> tuple[Kernels, torch.device]:
    """On a GPU where there is one, else in Triton's interpreter."""
    if machine == "cpu":
        return select("auto", torch.device("cpu")), torch.device("cpu")
    pytest.importorskip("triton")
    from thinpipe.codecs.kernels import cuda

    return cuda, torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities and NaN in the interpreter
@pytest.mark.parametrize("machine", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", [1, 9, 700, 1500])
def test_kernels_match_the_reference(machine: str, rows: int) -> None:
    kernels, device = kernels_of(machine)
    draw = torch.Generator().manual_seed(rows)
    bits = torch.tensor([3, 0, 8, 1, 5, 2, 0, 4, 7, 6], dtype=torch.uint8)
    starts, count, piece = bits.cumsum(0) - bits, int(bits.sum()), -(-rows // 8)
    z = torch.randn(len(bits), rows, generator=draw)
    z[2, 0], z[4, rows // 2], z[5, -1] = math.nan, math.inf, float(torch.tensor(boundaries(2))[1])
    gains = (torch.rand(rows, generator=draw) + 0.1).bfloat16()
    limits, values = (
        wires._table(of, rest, torch.device("cpu")) for of, rest in ((boundaries, math.inf), (levels, 0.0))
    )
    share = torch.tensor(8**-0.5)  # two axes have no bits
    expected, ours = torch.empty(2, rows, dtype=torch.bfloat16)
    reference.find_gains(z, share, expected)
    there = [each.to(device) for each in (z, share, ours)]
    kernels.find_gains(*there)
    torch.testing.assert_close(there[-1].cpu(), expected, rtol=2**-7, atol=0, equal_nan=True)  # summed in another order
    planes, ours = torch.full((2, count, piece), 0xAA, dtype=torch.uint8)
    reference.encode_axes(z, gains, bits, starts, limits, planes)
    there = [each.to(device) for each in (z, gains, bits, starts, limits, ours)]
    kernels.encode_axes(*there)
    mine = there[-1].cpu()
    damaged = planes.clone()
    damaged[starts[2] : starts[2] + 8] = mine[starts[2] : starts[2] + 8]  # of NaN codes may be anything
    assert torch.equal(damaged, mine)
    for wire, widths in ((planes, bits), (planes[: count - 9], bits)):  # the other has more bits than there are
        back, found = torch.full((2, len(bits), rows), 12345.0)
        reference.decode_axes(wire, gains, widths, starts, values, back)
        there = [each.to(device) for each in (wire, gains, widths, starts, values, found)]
        kernels.decode_axes(*there)
        assert torch.equal(back, there[-1].cpu())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities and NaN in the interpreter
@pytest.mark.parametrize("machine", ["cpu", "cuda"])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize(("groups", "size"), [(2, 48), (1, 1), (40, 33)])
def test_kernels_fold_moments(machine: str, bad: float | None, groups: int, size: int) -> None:
    kernels, device = kernels_of(machine)
    step, before = torch.rand(2, groups * size * (size + 1), generator=torch.Generator().manual_seed(size))
    weight = torch.tensor(0.36)
    if bad is not None:
        step[groups * size * size - 1] = bad  # the last square
    moments, new = torch.empty_like(step), torch.empty(())
    there = [each.to(device) for each in (step, before, weight, moments, new)]
    kernels.fold_moments(there[0], size, 0.2, 5, *there[1:])
    expected = before if bad is not None else 0.8 * before + 0.2 * step / 5
    torch.testing.assert_close(there[3].cpu(), expected)
    torch.testing.assert_close(there[4].cpu(), weight if bad is not None else torch.tensor(0.488))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU multiplies so")
@pytest.mark.parametrize("bits", [1, 2.5, 4])
@pytest.mark.parametrize("shape", [(4096, 96), (1001, 37)], ids=str)
def test_rounded_products_lose_hardly_more(
    shape: tuple[int, ...], bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, later = correlated(shape).cuda(), correlated(shape, seed=9).cuda()
    errors = []
    for most in (0, wires.ROUNDED_BITS):
        monkeypatch.setattr(wires, "ROUNDED_BITS", most)
        rows, basis = learned(x, bits)
        assert basis.reconstruction.dtype == (torch.bfloat16 if most else torch.float32)
        errors.append(error(round_trip(later, rows, basis, bits), later))
    assert errors[1] == pytest.approx(errors[0], rel=0.01)
