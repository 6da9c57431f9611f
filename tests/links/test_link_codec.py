"""Why floats travel as they are although a link has a codec; the same for every encoding."""

from __future__ import annotations

import pytest
import torch

from thinpipe.links.link_codec import RAW_BELOW
from thinpipe.links.registry import link_codec
from thinpipe.links.slot import Slot

SMALL = Slot(torch.Size([RAW_BELOW // 4 - 1]), torch.float32)
LARGE = Slot(torch.Size([16, RAW_BELOW // 4]), torch.float32)
MASK = Slot(torch.Size([RAW_BELOW]), torch.int64)


@pytest.mark.parametrize("spec", ["tile:8", "axes:4"])
def test_small_floats(spec: str) -> None:
    reason = link_codec(spec).why_uncompressed([SMALL, MASK])
    assert reason is not None
    assert "the largest tensor of a chunk has 4092 bytes" in reason
    assert f"{spec} encodes tensors of 4096 bytes and more" in reason


def test_floats_that_no_codec_encodes() -> None:
    complex_slot = Slot(LARGE.shape, torch.complex64)
    assert link_codec("tile:8").why_uncompressed([complex_slot]) == "tile:8 encodes no complex64"


def test_floats_that_do_not_shrink() -> None:
    slot = Slot(LARGE.shape, torch.float16)
    assert link_codec("fp16").why_uncompressed([slot]) == f"fp16 would not make {slot} smaller"


@pytest.mark.parametrize(
    ("spec", "slots"),
    [
        ("none", [SMALL]),
        ("tile:8", [LARGE, SMALL]),  # one of them is encoded
        ("tile:8", [MASK]),
        ("tile:8", []),
    ],
)
def test_an_empty_message(spec: str, slots: list[Slot]) -> None:
    assert link_codec(spec).why_uncompressed(slots) is None
