"""Digits: every image once, moved by a seed, and a model that can be cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinpipe.train.models.sequential import units_of
from thinpipe.train.tasks.task import Source
from thinpipe.train.tasks.tasks import task

DIGITS = task("digits")


def test_every_image_is_in_one_split_and_every_fifth_validates() -> None:
    data, shape = DIGITS.load(Source())
    assert (len(data.train), len(data.validation)) == (1437, 360)
    batch = data.validation.batch(torch.arange(360))
    assert batch.inputs[0].shape == (360, 3, 32, 32)
    assert batch.labels[:3].tolist() == [0, 5, 0]  # images 0, 5 and 10
    assert sorted(set(batch.labels.tolist())) == list(range(10)) == list(range(shape.classes))


def test_a_seed_moves_the_images_and_the_same_seed_moves_them_alike() -> None:
    data, _ = DIGITS.load(Source())
    some = torch.tensor([7, 3, 3])
    plain, one, again, two = (data.train.batch(some, augment_seed=seed) for seed in (None, 1, 1, 2))
    assert torch.equal(one.inputs[0], again.inputs[0])
    assert not torch.equal(one.inputs[0], two.inputs[0])
    assert not torch.equal(one.inputs[0], plain.inputs[0])
    assert torch.equal(plain.inputs[0][1], plain.inputs[0][2])
    assert one.labels.tolist() == two.labels.tolist()


def test_the_model_is_cut_into_the_twenty_units_of_mobilenet() -> None:
    data, shape = DIGITS.load(Source(image_size=16, width=0.1))
    model = DIGITS.build(shape, Source(image_size=16, width=0.1))
    units = units_of(model)
    assert len(units) == 20
    x = data.train.batch(torch.arange(2)).inputs[0]
    assert x.shape == (2, 3, 16, 16)
    assert torch.nn.Sequential(*units)(x).shape == (2, 10)


def test_batch_norms_remember_more_than_the_last_step() -> None:
    model = DIGITS.build(DIGITS.load(Source())[1], Source())
    momenta = {m.momentum for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)}
    assert momenta == {0.1}


def test_fewer_samples_are_some_of_the_same() -> None:
    data, _ = DIGITS.load(Source(samples=50))
    assert (len(data.train), len(data.validation)) == (50, 360)
    assert len(set(data.train.batch(torch.arange(50)).labels.tolist())) == 10


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (Source(tokens=5), "tokens"),
        (Source(weights=Path("there")), "weights"),
        (Source(weights=Path("there"), pretrained=False), "contradict"),
        (Source(image_size=8), "image_size is at least 16"),
        (Source(samples=0), "at least 1"),
    ],
)
def test_invalid_options_are_rejected(source: Source, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DIGITS.load(source)
