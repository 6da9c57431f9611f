"""Fashion-MNIST: the idx files as they are published, or the hub's rows; what is damaged is named in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.tasks.written import write_fashion_mnist, write_fashion_mnist_rows, write_idx
from thinpipe.train.models.sequential import units_of
from thinpipe.train.tasks.fashion import CLASSES
from thinpipe.train.tasks.task import Source
from thinpipe.train.tasks.tasks import task

FASHION = task("fashion-mnist")


@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_idx_files_become_images_with_an_edge(packed: bool, tmp_path: Path) -> None:
    source = Source(data=write_fashion_mnist(tmp_path / "data", packed=packed), width=0.1)
    units = FASHION.preflight(source)
    data, shape = FASHION.load(source)
    assert (len(data.train), len(data.validation), data.classes, shape.labels) == (40, 20, 10, CLASSES)
    batch = data.validation.batch(torch.tensor([3, 17]))
    assert batch.labels.tolist() == [3, 7]
    (images,) = batch.inputs
    assert images.shape == (2, 3, 32, 32)
    assert (images[:, :, :2] == -1).all()  # black
    assert (images[..., 30:] == -1).all()
    pixels = np.random.default_rng(20).integers(0, 256, (20, 28, 28), dtype=np.uint8)[3]
    inner = (images[0, :, 2:30, 2:30] / 2 + 0.5) * 255
    assert torch.allclose(inner, torch.from_numpy(pixels).float().expand(3, 28, 28), atol=1e-3)
    moved, again = (data.train.batch(torch.arange(8), augment_seed=5).inputs[0] for _ in range(2))
    assert torch.equal(moved, again)
    assert not torch.equal(moved, data.train.batch(torch.arange(8)).inputs[0])
    model = FASHION.build(shape, source)
    assert len(units_of(model)) == units
    assert model(images).logits.shape == (2, 10)


def test_the_hubs_rows_are_the_same_pictures(tmp_path: Path) -> None:
    source = Source(data=write_fashion_mnist_rows(tmp_path / "rows"), width=0.1)
    FASHION.preflight(source)
    data, shape = FASHION.load(source)
    images = data.train.batch(torch.arange(4)).inputs[0]
    assert (shape.classes, images.shape) == (10, (4, 3, 32, 32))
    assert (images[:, :, :2] == -1).all()
    assert torch.equal(images[:, 0], images[:, 2])  # grey
    assert len(images.flatten(1).unique(dim=0)) == 4


def images_of(folder: Path) -> Path:
    return folder / "train-images-idx3-ubyte"


def labels_of(folder: Path) -> Path:
    return folder / "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: labels_of(folder).unlink(), r"has no t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte\.gz"),
        (lambda folder: [file.unlink() for file in folder.iterdir()], "has no train-images-idx3-ubyte"),
        (lambda folder: labels_of(folder).write_bytes(b""), "t10k-labels-idx1-ubyte cannot be read as an idx file"),
        (lambda folder: images_of(folder).write_bytes(b"\x89PNG\r\n\x1a\n" * 9), "it begins with 89 50 4e 47"),
        (lambda folder: images_of(folder).write_bytes(images_of(folder).read_bytes()[:-1]), "and has only 31359"),
        (lambda folder: images_of(folder).write_bytes(images_of(folder).read_bytes() + b"x"), "and has more"),
        (
            lambda folder: write_idx(images_of(folder), np.zeros((40, 32, 32), np.uint8), packed=False),
            r"should have images of 28 x 28 pixels, at least one; it has \(40, 32, 32\)",
        ),
        (
            lambda folder: write_idx(labels_of(folder), np.zeros(7, np.uint8), packed=False),
            "has 7 labels, and t10k-images-idx3-ubyte has 20 images",
        ),
        (
            lambda folder: write_idx(labels_of(folder), np.full(20, 10, np.uint8), packed=False),
            "labels are 0 to 9, and number 0 is 10",
        ),
    ],
)
def test_damaged_files_are_named_in_one_line(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    folder = write_fashion_mnist(tmp_path / "data", packed=False)
    spoil(folder)
    with pytest.raises(ValueError, match=message) as error:
        both(Source(data=folder))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("kept", [0.5, 0.01], ids=["half", "header"])
def test_a_packed_file_that_breaks_off_is_named(kept: float, tmp_path: Path) -> None:
    file = write_fashion_mnist(tmp_path / "data") / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz cannot be read as an idx file"):
        both(Source(data=tmp_path / "data"))


def both(source: Source) -> None:
    FASHION.preflight(source)
    FASHION.load(source)
