"""auto:A-B on links: levels change between steps, both ends agree on sizes, and the basis is learned at all of them."""

from __future__ import annotations

import pytest
import torch

from tests.links.learned.test_pca_codec import CHUNKS, SHAPE, Link, batch
from tests.links.learned.test_transform import error
from thinpipe.codecs.spec import codec
from thinpipe.links.learned.learner import LEAD
from thinpipe.links.learned.pca_codec import START
from thinpipe.links.learned.row_layout import rows_of
from thinpipe.links.registry import check_directions, link_codec, sent_once
from thinpipe.links.slot import Slot

SLOT = Slot(torch.Size(SHAPE), torch.float32)
ROWS = rows_of(SHAPE, 2.5, CHUNKS, (4.0,))
assert ROWS is not None
SIZES = {
    8: codec("tile:8").wire_bytes(SHAPE, torch.float32),
    4: codec("gauss:5+coded").wire_bytes(SHAPE, torch.float32),
    3: ROWS.wire_bytes(4),
    2: ROWS.wire_bytes(2.5),
}


def at_level(link: Link, level: int, first: int | None = None) -> None:
    for end in link.ends:
        end.level, end.first_level = level, first or level


def plain(link: Link) -> list[int]:
    """Return the sizes of the last step's messages, without the parts of a basis."""
    carried = sum(-(-ROWS.basis_bytes // CHUNKS) for end in [link.sender] if end._carried(0))  # type: ignore[attr-defined]
    return [size - carried for size in link.sizes[-1]]


def learned() -> Link:
    """Return a link whose basis was learned at 8 and 4 bits."""
    link = Link("auto:2-8")
    for seed in range(START + LEAD + 1):
        at_level(link, 8 if seed % 3 else 4)
        link.step(batch(seed))
    return link


def test_before_a_basis_is_known_the_fewest_bits_are_those_of_the_first_codec() -> None:
    link = Link("auto:2-8")
    for level in (8, 4, 3, 2):
        at_level(link, level)
        link.step(batch(level))
    assert link.sizes == [[size] * CHUNKS for size in (SIZES[8], SIZES[4], SIZES[8], SIZES[8])]


def test_levels_change_from_step_to_step_and_each_has_its_size_and_error() -> None:
    link, errors, x = learned(), {}, batch(100)
    for level in (8, 3, 2, 4, 2, 8):
        at_level(link, level)
        errors[level] = error(link.step(x)[0], x)
        assert plain(link) == [SIZES[level]] * CHUNKS
    assert errors[3] < errors[2] < 0.1
    assert errors[8] < 0.01
    assert errors[4] < 0.01
    assert len(set(errors.values())) == 4
    at_level(link, 2, first=8)
    link.step(x)
    assert plain(link) == [SIZES[8], *[SIZES[2]] * (CHUNKS - 1)]
    assert link_codec("auto:2-8").level_bytes([SLOT], CHUNKS) == tuple(SIZES.values())
    assert link_codec("auto:2-8").wire_formats(SLOT, CHUNKS)[0].wire_bytes == SIZES[8]


def test_each_level_decodes_like_its_preset() -> None:
    """The basis is that of ``axes`` alone: allocations of other levels change neither it nor the errors."""
    alone, x = Link("axes:2.5"), batch(100)
    for seed in range(START + LEAD + 1):
        alone.step(batch(seed))
    expected = alone.step(x)[0]
    link = learned()
    at_level(link, 2)
    assert torch.equal(link.step(x)[0], expected)


def test_a_loaded_link_continues_bit_for_bit() -> None:
    link = learned()
    saved, resumed = link.state(), Link("auto:2-8")
    resumed.load(saved)
    resumed.steps = 0
    for seed, level in enumerate((2, 3, 8, 2, 2)):
        at_level(link, level)
        at_level(resumed, level)
        assert torch.equal(link.step(batch(seed))[0], resumed.step(batch(seed))[0])


def test_gradients_use_the_codecs_of_the_presets_and_learn_nothing() -> None:
    link = Link("auto:1-8+gradients")
    specs = {8: "tile:8+zero", 4: "gauss:3.35+coded+unbiased", 3: "gauss:2+unbiased", 1: "gauss:1+unbiased"}
    for level, spec in specs.items():
        at_level(link, level)
        link.step(batch(level))
        assert link.sizes[-1] == [codec(spec).wire_bytes(SHAPE, torch.float32)] * CHUNKS
    assert link.sender.shared_state_dict() == {}


def test_what_is_sent_once_uses_the_first_codec() -> None:
    assert sent_once("auto:2-8").spec == "tile:8"
    assert sent_once("auto:2-4").spec == "gauss:5+coded"
    assert sent_once("auto:2-8").levels == ()


@pytest.mark.parametrize("spec", ["auto:8-2", "auto:2-5", "auto:3-3", "auto:0-8", "auto:2", "auto:2-8+now"])
def test_other_ranges_are_rejected(spec: str) -> None:
    with pytest.raises(ValueError, match="auto takes the fewest and the most bits per value, as in auto:2-8"):
        link_codec(spec)


def test_each_direction_has_its_own() -> None:
    check_directions("auto:2-8", "auto:2-8+gradients")
    with pytest.raises(ValueError, match="is for gradients"):
        check_directions("auto:2-8+gradients", "auto:2-8+gradients")
    with pytest.raises(ValueError, match="is for activations"):
        check_directions("auto:2-8", "auto:2-8")
