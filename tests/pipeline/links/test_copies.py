"""Copies of samples: what they hold, what they leave out, where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinpipe.pipeline.links.copies import COPY_DTYPE, SampleCopies, check_samples, copies_bytes

SAMPLES, SHAPE = 10, (3, 4)


def filled(directory: Path | None = None) -> tuple[SampleCopies, torch.Tensor]:
    copies, value = SampleCopies(SAMPLES, directory), torch.randn(4, *SHAPE)
    copies.reserve(0, SHAPE)
    copies.begin(torch.tensor([7, 2, 5, 0]), 2)
    for chunk in range(2):
        copies.remember(chunk, 0, value[2 * chunk : 2 * chunk + 2])
    return copies, value


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_chunk_is_known_when_all_its_samples_are(tmp_path: Path, on_disk: bool) -> None:
    copies, value = filled(tmp_path / "deep" / "cache" if on_disk else None)
    assert not copies.knows(0)  # the step under way was told before
    copies.begin(torch.tensor([0, 7, 2, 1]), 2)
    assert [copies.knows(0), copies.knows(1)] == [True, False]
    x = torch.randn(2, *SHAPE)
    assert torch.equal(copies.change(0, 0, x), x - value[[3, 0]].to(COPY_DTYPE).float())
    change = torch.randn(2, *SHAPE)
    applied = copies.apply(0, 0, change)
    assert torch.equal(applied, value[[3, 0]].to(COPY_DTYPE).float() + change)
    assert torch.equal(copies.state_dict()["0"][[0, 7]], applied.to(COPY_DTYPE))
    assert not list(tmp_path.rglob("*.*")), "a file is gone with its process, however that ends"


def test_an_evaluation_changes_nothing() -> None:
    copies, _ = filled()
    before = {name: tensor.clone() for name, tensor in copies.state_dict().items()}
    copies.begin(None, 2)
    assert not copies.are_kept
    assert not copies.knows(0)
    copies.remember(0, 0, torch.ones(2, *SHAPE))
    assert all(torch.equal(tensor, before[name]) for name, tensor in copies.state_dict().items())


def test_what_half_precision_cannot_hold_is_left_to_the_next_change() -> None:
    copies, _ = filled()
    hard = torch.tensor([1e30, -1e30, float("nan"), float("inf"), 65519.0, 1e-12, 3.0, -0.0, 1.0, 2.0, 3.0, 4.0])
    value = torch.stack([hard.view(SHAPE), hard.view(SHAPE)])
    copies.begin(torch.tensor([1, 3]), 1)
    copies.remember(0, 0, value)
    assert copies.state_dict()["0"].isfinite().all()
    copies.begin(torch.tensor([1, 3]), 1)
    finite = value.isfinite()
    change = copies.change(0, 0, value)
    torch.testing.assert_close(copies.apply(0, 0, change)[finite], value[finite])
    assert not change[~finite].isfinite().any()  # not hidden


def test_saved_and_loaded(tmp_path: Path) -> None:
    copies, _ = filled()
    other = SampleCopies(SAMPLES, tmp_path)
    other.load_state_dict(copies.state_dict())
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in copies.state_dict().items())
    other.load_state_dict({})
    assert not other.known.any()
    with pytest.raises(ValueError, match="copies of 11 samples are kept here, these are of 10"):
        SampleCopies(11).load_state_dict(copies.state_dict())
    with pytest.raises(ValueError, match=r"tensor 0 has \[5\] each, its copies have \[3, 4\]"):
        copies.reserve(0, (5,))


def test_a_place_that_has_no_room_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"copies of samples need 0\.0 MB in .*file.*name another place"):
        SampleCopies(SAMPLES, tmp_path / "file").reserve(0, SHAPE)
    with pytest.raises(ValueError, match="Make room"):
        SampleCopies(1 << 20, tmp_path).reserve(0, (1 << 30,))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_bytes_are_those_of_all_samples() -> None:
    copies, _ = filled()
    stored = copies.state_dict()["0"]
    assert copies_bytes(SAMPLES, (2, *SHAPE)) == stored.numel() * stored.element_size()


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([0, 10], "counted from 0 and there are 10, got 10"),
        ([-1, 3], "got -1"),
        ([4, 2, 4], "all different, got 4 twice"),
        ([0.5, 1.5], "whole numbers in a row"),
        ([[0, 1]], "whole numbers in a row, got 2-D"),
    ],
)
def test_what_is_no_list_of_samples(samples: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_samples(samples, SAMPLES)
