"""svd and power: the best rank, how close the iteration comes, and what a link's memory buys."""

import pytest
import torch

import thinpipe
from tests.codecs.helpers import round_trip, squared_error


def decaying(*shape: int) -> torch.Tensor:
    """Matrices whose k-th singular value is about 0.7^k."""
    u, _, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    return (u * 0.7 ** torch.arange(u.shape[-1])) @ vh


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_svd_is_the_best_approximation(rank):
    x = decaying(6, 40, 56)
    expected = torch.linalg.svdvals(x)[..., rank:].double().square().sum().item()
    assert squared_error(f"svd:{rank}", x) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["svd", "power"])
def test_matrices_of_that_rank_come_back(name):
    x = torch.randn(5, 40, 3) @ torch.randn(5, 3, 50)
    torch.testing.assert_close(round_trip(f"{name}:3", x), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 64, 96), (2, 3, 96, 64), (100, 80)], ids=str)
def test_power_comes_close_to_svd(shape):
    x = decaying(*shape)
    assert squared_error("svd:6", x) <= squared_error("power:6", x) <= 1.1 * squared_error("svd:6", x)


def test_wire_is_the_two_factors():
    codec = thinpipe.codec("svd:14")
    assert codec.wire_bytes((8, 128, 768), torch.float32) == 4 * 8 * 14 * (128 + 768)


@pytest.mark.parametrize("shape", [(100,), (32, 7, 7), (3, 1, 50), ()], ids=str)
@pytest.mark.parametrize("name", ["svd", "power"])
def test_values_are_sent_if_factors_are_not_smaller(name, shape):
    x = torch.randn(shape)
    assert thinpipe.codec(f"{name}:4").wire_bytes(shape, torch.float32) == 4 * x.numel()
    assert torch.equal(round_trip(f"{name}:4", x), x)


def test_a_links_memory_improves_on_a_cold_start():
    """Tensors that change slowly, of flat spectrum: each start from the last basis gets closer to the best one."""
    codec = thinpipe.codec("power:4")
    x = torch.randn(2, 64, 64)
    state: dict[str, torch.Tensor] = {}

    def error(**memory) -> float:
        return (codec.decode(codec.encode(x, **memory), torch.empty_like(x)) - x).square().sum().item()

    cold = error()
    for _ in range(30):
        warm = error(state=state)
    assert warm < 0.99 * cold
    assert state
    assert error() == cold  # the codec itself remembers nothing


def test_memory_survives_zeros_nan_and_other_shapes():
    codec = thinpipe.codec("power:2")
    state: dict[str, torch.Tensor] = {}
    x = decaying(3, 30, 40)
    for other in (torch.zeros_like(x), torch.full_like(x, torch.nan), x[:1], x):
        wire = codec.encode(other, state=state)
        decoded = codec.decode(wire, torch.empty_like(other))
    for kept in state.values():
        assert kept.isfinite().all()
    fresh = codec.decode(codec.encode(x), torch.empty_like(x))
    torch.testing.assert_close(decoded, fresh, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("name", ["svd", "power"])
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e30, 1e37])
def test_scale_does_not_matter(name, scale):
    unit = torch.randn(4, 24, 2) @ torch.randn(4, 2, 30)
    x = (unit / unit.abs().max()).double() * scale
    decoded = round_trip(f"{name}:2", x.float()).double()
    assert (decoded - x).abs().max().item() <= 1e-4 * scale + 2e-44
