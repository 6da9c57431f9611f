"""Public tasks: every recipe's data and model from folders in the real formats; a quick answer without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.train.tasks.written import (
    Format,
    write_cifar10,
    write_cifar100,
    write_food101,
    write_glue,
    write_mobilenet,
    write_roberta,
)
from thinpipe.train.models.sequential import units_of
from thinpipe.train.tasks import hub
from thinpipe.train.tasks.task import Batch, Source, TaskDefaults
from thinpipe.train.tasks.tasks import task

IMAGES = {"cifar10": (write_cifar10, 10), "cifar100": (write_cifar100, 100), "food101": (write_food101, 101)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both checkpoints, and glue with two data sets in it."""
    path = tmp_path_factory.mktemp("public")
    write_mobilenet(path / "mobilenet")
    write_roberta(path / "roberta")
    write_glue(path / "glue", "rte")
    write_glue(path / "glue", "cola")
    return path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that nobody answers for."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    hub.reachable.cache_clear()
    yield
    hub.reachable.cache_clear()


def through_units(model: torch.nn.Module, batch: Batch) -> Tensor:
    values = batch.inputs
    for unit in units_of(model):
        output = unit(*values)
        values = output if isinstance(output, tuple) else (output,)
    return values[0]


@pytest.mark.parametrize("form", ["parquet", "saved"])
@pytest.mark.parametrize("name", IMAGES)
def test_images_and_weights_come_from_disk(name: str, form: Format, folder: Path, tmp_path: Path) -> None:
    write, classes = IMAGES[name]
    source = Source(data=write(tmp_path / "data", form=form), weights=folder / "mobilenet", image_size=32)
    data, shape = task(name).load(source)
    assert (shape.classes, shape.image_size, data.classes) == (classes, 32, classes)
    everything = data.train.batch(torch.arange(len(data.train)))
    assert everything.inputs[0].shape == (len(data.train), 3, 32, 32)
    assert everything.labels.tolist() == [index % classes for index in range(len(data.train))]
    assert len(everything.inputs[0].flatten(1).unique(dim=0)) == len(data.train)  # every picture another
    model = task(name).build(shape, source)
    assert through_units(model, data.validation.batch(torch.arange(3))).shape == (3, classes)
    assert len(units_of(model)) == task(name).preflight(source)


@pytest.mark.parametrize("form", ["parquet", "saved"])
@pytest.mark.parametrize(("name", "columns"), [("rte", 2), ("cola", 1)])
def test_texts_and_weights_come_from_disk(name: str, columns: int, form: Format, folder: Path, tmp_path: Path) -> None:
    data_folder = folder / "glue" if form == "parquet" else write_glue(tmp_path / "saved", name, form="saved")
    source = Source(data=data_folder, weights=folder / "roberta")
    data, shape = task(name).load(source)
    assert (shape.classes, shape.tokens, len(data.train), len(data.validation)) == (2, 128, 40, 20)
    batch = data.train.batch(torch.tensor([5, 0]))
    ids, mask = batch.inputs
    assert ids.shape == mask.shape == (2, 128)
    assert batch.labels.tolist() == [1, 0]
    ends = 2 * columns - 1  # <s> a </s>, or <s> a </s></s> b </s>
    assert ((ids == 2).sum(1) == ends).all()
    assert (ids[mask == 0] == 1).all()
    model = task(name).build(shape, source)
    assert through_units(model, batch).shape == (2, 2)
    assert len(units_of(model)) == task(name).preflight(source)


@pytest.mark.parametrize("name", ["cifar10", "food101"])
def test_a_seed_augments_alike_every_time(name: str, folder: Path, tmp_path: Path) -> None:
    source = Source(data=IMAGES[name][0](tmp_path / "data"), weights=folder / "mobilenet", image_size=32)
    data, _ = task(name).load(source)
    some = torch.arange(8)
    plain, one, again, two = (data.train.batch(some, augment_seed=seed).inputs[0] for seed in (None, 1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    assert not torch.equal(one, plain)


def test_weights_are_the_checkpoints_but_for_the_classifier(folder: Path, tmp_path: Path) -> None:
    source = Source(data=write_cifar10(tmp_path / "data"), weights=folder / "mobilenet", image_size=32)
    _, shape = task("cifar10").load(source)
    one, two = (task("cifar10").build(shape, source).state_dict() for _ in range(2))
    differ = {name for name in one if not torch.equal(one[name], two[name])}
    assert differ == {"classifier.weight"}


def test_the_recipes_are_the_ones_of_the_published_tables() -> None:
    for name in IMAGES:
        assert task(name).defaults == TaskDefaults(
            batch_size=256, chunks=8, epochs=40, optimizer="sgd", lr=0.01, lr_schedule="cosine", client_layers=(1, 1)
        )
    for name in ("rte", "cola"):
        recipe = task(name).defaults
        assert (recipe.batch_size, recipe.chunks, recipe.epochs, recipe.lr) == (32, 4, 20, 2e-5)
        assert (recipe.optimizer, recipe.lr_schedule, recipe.client_layers) == ("adamw", "linear", (2, 2))
    assert (task("rte").metric, task("cola").metric) == ("accuracy", "matthews")


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("cifar10", "hf download uoft-cs/cifar10 --repo-type dataset --local-dir cifar10"),
        ("rte", 'hf download nyu-mll/glue --repo-type dataset --include "rte/*" --local-dir glue'),
    ],
)
def test_without_network_and_data_the_error_has_the_download_command(name: str, command: str) -> None:
    with pytest.raises(ValueError, match="cannot be reached") as raised:
        task(name).load(Source(pretrained=False))
    assert command in str(raised.value)
    assert "and give data " in str(raised.value)


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("name", "checkpoint"), [("food101", "google/mobilenet_v2_1.0_224"), ("cola", "FacebookAI/roberta-base")]
)
def test_without_network_and_weights_the_error_has_the_download_command(name: str, checkpoint: str) -> None:
    with pytest.raises(ValueError, match="cannot be reached") as raised:
        task(name).load(Source())
    assert f"hf download {checkpoint} --local-dir" in str(raised.value)
    assert "and give weights " in str(raised.value)


def test_random_weights_need_no_checkpoint(folder: Path) -> None:
    source = Source(data=folder / "glue", pretrained=False, width=0.0625, tokens=16)
    data, shape = task("rte").load(source)
    model = task("rte").build(shape, source)
    assert len(units_of(model)) == 14  # roberta-base's layers, 48 values wide
    assert through_units(model, data.train.batch(torch.arange(2))).shape == (2, 2)


def test_wrong_folders_are_named(folder: Path, tmp_path: Path) -> None:
    weights = folder / "mobilenet"
    with pytest.raises(ValueError, match="nowhere is none"):
        task("cifar10").load(Source(data=tmp_path / "nowhere", weights=weights))
    with pytest.raises(ValueError, match="splits train, test; it has none"):
        task("cifar10").load(Source(data=tmp_path, weights=weights))
    with pytest.raises(ValueError, match=r"columns image, label.*it has img, label"):
        task("food101").load(Source(data=with_validation(tmp_path / "cifar"), weights=weights))
    with pytest.raises(ValueError, match=r"no .*config\.json"):
        task("cifar10").load(Source(data=tmp_path, weights=tmp_path))
    with pytest.raises(ValueError, match=r"takes weights of a mobilenet_v2.* of a roberta"):
        task("cifar10").load(Source(data=tmp_path, weights=folder / "roberta"))


def with_validation(path: Path) -> Path:
    write_cifar10(path)
    for file in (path / "plain_text").glob("test-*"):
        file.rename(file.with_name(file.name.replace("test", "validation")))
    return path


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install"):
        hub.datasets_library()


@pytest.mark.parametrize(
    ("name", "source", "named"),
    [
        ("cifar10", Source(tokens=5), "not tokens"),
        ("rte", Source(image_size=32), "not image_size"),
        ("rte", Source(weights=Path("w"), width=0.5), "width is for random weights"),
    ],
)
def test_options_of_other_tasks_are_refused(name: str, source: Source, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        task(name).load(source)
