"""Order statistics on a GPU: samples that enclose cuts, the one read, and the search among what it keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.codecs.gpu import CONTENTS, MARKS, ON_GPU, cuda, decoded, encoded, in_the_interpreter, set_constants
from tests.codecs.helpers import content
from thinpipe.codecs.kernels import cpu, reference

pytestmark = MARKS


@pytest.mark.parametrize("name", CONTENTS)
def test_the_sample_finds_the_cuts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search through everything, which is right for any sample."""
    if not ON_GPU:

        def forbidden(*args: object) -> None:
            raise AssertionError("a bracket did not hold its cut")

        monkeypatch.setattr(cuda.select, "open_all", forbidden)
    x = content(name, (40_000 if ON_GPU else 9000,))
    assert torch.equal(encoded("sort:4+2", x), encoded("sort:4+2", x, cpu))


@in_the_interpreter
@pytest.mark.parametrize(("spec", "name"), [("sort:4+2", "laplace"), ("sort:3+1", "outliers"), ("topk:0.1", "relu6")])
def test_large_tensors_are_counted_in_a_few_bins_first(spec: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = sys.modules["thinpipe.codecs.kernels.cuda.radix_select"]
    bins, pick = [], windows._pick
    monkeypatch.setattr(windows, "_pick", lambda *args: (bins.append(int(args[3].handle.data.item())), pick(*args)))
    set_constants(monkeypatch, LARGE=4096, FEW=16)
    x = content(name, (9000,))
    assert torch.equal(encoded(spec, x), encoded(spec, x, cpu))
    assert bins[0] <= windows.DENSE.value < windows.BINS.value


@in_the_interpreter
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


@in_the_interpreter
def test_zeros_of_both_signs_are_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mask makes them of positive and negative gradients; searching everything for them would be slow."""
    monkeypatch.setattr(cuda.select, "open_all", None)
    x = content("laplace", (9000,)) * (torch.arange(9000) % 4 == 0)
    assert torch.signbit(x[x == 0]).any()
    assert torch.equal(
        decoded("sort:4+2", encoded("sort:4+2", x), x), decoded("sort:4+2", encoded("sort:4+2", x, cpu), x)
    )


@in_the_interpreter
def test_a_cut_next_to_the_maximum_is_found_among_kept_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bracket has no upper end, and what fills up the last span is not kept with it."""
    monkeypatch.setattr(cuda.select, "open_all", None)
    x = content("laplace", (9000,))
    assert torch.equal(encoded("topk:0.001", x), encoded("topk:0.001", x, cpu))


@in_the_interpreter
def test_a_frequent_minimum_needs_few_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a ReLU: its bracket begins with that value."""
    reading = sys.modules["thinpipe.codecs.kernels.cuda.counting"]
    spans, count = [], reading._count_few
    monkeypatch.setattr(reading, "_count_few", lambda *args: spans.append(1) or count(*args))
    x = content("laplace", (9000,)).relu()
    assert torch.equal(encoded("sort:4+1", x), encoded("sort:4+1", x, cpu))
    assert spans


@in_the_interpreter
def test_without_capacity_everything_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = watch_searching_everything(monkeypatch)
    monkeypatch.setattr(cuda.rank_search, "slots_per_column", lambda n, programs, cuts: cuda.counting.EACH.value)
    x = content("laplace", (20_000,))
    assert torch.equal(encoded("sort:4+2", x), encoded("sort:4+2", x, cpu))
    assert searched


def watch_searching_everything(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets longer whenever all of the tensor is searched for cuts."""
    searched: list[int] = []
    search = cuda.select.open_all
    monkeypatch.setattr(cuda.select, "open_all", lambda *args: searched.append(1) or search(*args))
    return searched


def few_values() -> Tensor:
    return torch.randint(0, 12, (9000,), generator=torch.Generator().manual_seed(0)) / 7


def cuts_between_many_equal_values() -> Tensor:
    """Behind each of 16 equal parts enough values are equal that its cut is one of them, and all others differ."""
    x = torch.rand(30_000, generator=torch.Generator().manual_seed(0))
    border = (x * 16).round() / 16
    return torch.where((x - border).abs() < 0.0165, border, x)


@in_the_interpreter
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


@pytest.mark.parametrize("fraction", [0.5, 0.01])
def test_largest_values_with_ties(fraction: float) -> None:
    assert_kept_as_on_the_cpu(f"topk:{fraction}", (torch.arange(9000) % 11 - 5).float())


@pytest.mark.parametrize("count", [11 << 19, 11 << 20] if ON_GPU else [4097, 9000])
def test_the_longer_a_tensor_the_more_steps_has_a_block(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        set_constants(monkeypatch, BLOCKS=2)
    assert_kept_as_on_the_cpu("topk:0.3", content("laplace", (count,)))


@in_the_interpreter
@pytest.mark.parametrize("count", [8 * 2048, 8 * 2048 + 1, 13 * 2048 - 1], ids=["2 groups", "3 groups", "4 groups"])
def test_groups_of_blocks_are_summed_up_in_one_go_or_more(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties all over the tensor, of which the last group that has any kept keeps a few."""
    set_constants(monkeypatch, SUMS=2)
    assert_kept_as_on_the_cpu("topk:0.3", (torch.arange(count) % 7 - 2).float())


@pytest.mark.parametrize("every", [50, 5], ids=["above the threshold", "as the threshold"])
def test_nan_is_kept_as_infinity_is(every: int) -> None:
    x = content("laplace", (9000,))
    x[::every], x[1::every] = torch.nan, -torch.inf
    assert torch.equal(encoded("topk:0.1", x), encoded("topk:0.1", x, reference))


def assert_kept_as_on_the_cpu(spec: str, x: Tensor) -> None:
    wire = encoded(spec, x)
    assert torch.equal(wire, encoded(spec, x, cpu))
    assert torch.equal(decoded(spec, wire, x), decoded(spec, wire, x, cpu))
