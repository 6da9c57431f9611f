"""Augmentation: what moves, what stays, and what a seed fixes."""

from __future__ import annotations

import torch

from thinpipe.train.tasks.pictures import crop_and_resize, flip, pad_and_crop, resized, to_model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_pad_and_crop_moves_each_image_by_itself() -> None:
    images = torch.zeros(200, 1, 9, 9)
    images[:, :, 4, 4] = 1
    moved = pad_and_crop(images, 2, seeded())
    places = moved.flatten(1).argmax(1)
    rows, columns = places // 9, places % 9
    assert (moved.sum((1, 2, 3)) == 1).all()
    assert set(rows.tolist()) == set(columns.tolist()) == {2, 3, 4, 5, 6}
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == 25


def test_pad_and_crop_keeps_bytes_and_channels_together() -> None:
    image = torch.arange(1, 76, dtype=torch.uint8).view(1, 3, 5, 5)
    moved = pad_and_crop(image, 1, seeded(3))
    assert moved.dtype == torch.uint8
    shifts = [torch.roll(image, (down, right), (2, 3)) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    assert any(torch.equal(moved[..., 1:-1, 1:-1], each[..., 1:-1, 1:-1]) for each in shifts)


def test_flip_turns_about_half_of_the_images() -> None:
    images = torch.rand(400, 3, 2, 4)
    flipped = flip(images, seeded())
    turned = torch.tensor([torch.equal(one, other.flip(-1)) for one, other in zip(flipped, images, strict=True)])
    kept = torch.tensor([torch.equal(one, other) for one, other in zip(flipped, images, strict=True)])
    assert (turned ^ kept).all()
    assert 150 < turned.sum() < 250


def test_crop_and_resize_of_everything_is_the_image() -> None:
    images = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(crop_and_resize(images, 8, seeded(), least=1.0), images)


def test_crop_and_resize_stays_inside_and_magnifies() -> None:
    ramp = torch.linspace(0, 1, 64).expand(300, 1, 64, 64)
    windows = crop_and_resize(ramp, 32, seeded())
    spans = windows[:, 0, 0, -1] - windows[:, 0, 0, 0]
    assert (windows >= 0).all()
    assert (windows <= 1).all()
    assert spans.min() > 0.5  # the root of 0.35, less the edges
    assert spans.max() <= 1
    assert spans.max() - spans.min() > 0.2


def test_images_come_normalised_in_three_channels() -> None:
    images = torch.tensor([[[[0, 255]]]], dtype=torch.uint8).expand(2, 1, 2, 2)
    ready = to_model(images, 2)
    assert ready.shape == (2, 3, 2, 2)
    assert ready[0, 2].tolist() == [[-1, 1], [-1, 1]]
    assert to_model(images, 8).shape == (2, 3, 8, 8)
    assert resized(images, 2).max() == 1
