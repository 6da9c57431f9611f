"""Any classifier of transformers in a folder: its head made for the data, its tokenizer and image processor used."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.train.tasks.written import (
    SENTENCES,
    write_fashion_mnist,
    write_glue,
    write_image_classifier,
    write_picture,
    write_text_classifier,
)
from thinpipe.train.engines.units import cut_model, meta_of
from thinpipe.train.tasks.mobilenet import BATCH_NORM_MOMENTUM
from thinpipe.train.tasks.task import Shape, Source
from thinpipe.train.tasks.tasks import task


def rows(folder: Path, header: str = "sentence,label", count: int = 20) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    line = "{0},{1}" if header.count(",") == 1 else "{0},{0},{1}"
    lines = [line.format(SENTENCES[n % 4], ("good", "bad", "so so")[n % 3]) for n in range(count)]
    (folder / "rows.csv").write_text("\n".join([header, *lines]))
    return folder / "rows.csv"


def pictures(folder: Path) -> Path:
    for number in range(12):
        write_picture(folder / ("cats" if number % 2 else "dogs") / f"{number}.png", seed=number)
    return folder


def filled(name: str, shape: Shape, source: Source, seed: int = 3) -> nn.Module:
    """The whole model with its weights, as one process has it."""
    model = task(name).build(shape, source)
    assert all(parameter.is_meta for parameter in model.parameters())
    load = task(name).weight_loader(source, seed)
    load(model, model.state_dict())
    return model.eval()


def test_texts_with_a_bert_of_ones_own(tmp_path: Path) -> None:
    """Pairs of texts are told apart; classes are called what the file calls them; all but the head is the folder's."""
    folder = write_text_classifier(tmp_path / "bert")
    source = Source(data=rows(tmp_path, "text1,text2,label"), model=str(folder), tokens=24)
    assert task("texts").preflight(source) is None
    data, shape = task("texts").load(source)
    assert (shape.classes, shape.labels, shape.special[-1]) == (3, ("bad", "good", "so so"), 0)
    batch = data.train.batch(torch.arange(4))
    ids, mask, types = batch.inputs
    assert (ids[mask == 0] == 0).all()
    assert types.max() == 1
    model = filled("texts", shape, source)
    assert model.config.id2label == {0: "bad", 1: "good", 2: "so so"}
    assert model.config.label2id["so so"] == 2
    assert model(ids, mask, types).logits.shape == (4, 3)
    saved = load_file(folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name]) == (not name.startswith("classifier")), name
    again, other = (filled("texts", shape, source, seed).classifier.weight for seed in (3, 4))
    assert torch.equal(model.classifier.weight, again)
    assert not torch.equal(again, other)


def test_a_head_for_the_same_classes_is_the_folders(tmp_path: Path) -> None:
    folder = write_text_classifier(tmp_path / "bert", num_labels=3)
    source = Source(data=rows(tmp_path), model=str(folder), tokens=16)
    data, shape = task("texts").load(source)
    assert len(data.train.batch(torch.arange(1)).inputs) == 2  # one text a row: its tokens are all of one type
    model = filled("texts", shape, source)
    assert torch.equal(model.classifier.weight, load_file(folder / "model.safetensors")["classifier.weight"])


def test_a_bare_model_gets_a_head_and_one_without_its_layers_is_refused(tmp_path: Path) -> None:
    """As a masked language model's body is saved: names without their first part, no pooler, no classifier."""
    folder = write_text_classifier(tmp_path / "bert")
    whole = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("bert."): tensor for name, tensor in whole.items() if name.startswith("bert.enc")}
    bare |= {name.removeprefix("bert."): tensor for name, tensor in whole.items() if name.startswith("bert.emb")}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    source = Source(data=rows(tmp_path), model=str(folder), tokens=16)
    _, shape = task("texts").load(source)
    model = filled("texts", shape, source)
    for name, tensor in bare.items():
        assert torch.equal(model.state_dict()[f"bert.{name}"], tensor)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    bare.pop("encoder.layer.2.output.dense.weight")
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"bert\.encoder\.layer\.2\.output\.dense\.weight is missing"):
        filled("texts", shape, source)


def test_texts_are_filled_up_for_a_model_that_has_no_token_for_it(tmp_path: Path) -> None:
    """GPT-2's end of a text serves, on the side of its tokenizer; servers, without one, are told the number."""
    folder = write_text_classifier(tmp_path / "gpt2", "gpt2", eos_token_id=3, bos_token_id=3)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    source = Source(data=rows(tmp_path), model=str(folder), tokens=16)
    data, shape = task("texts").load(source)
    ids, mask = data.train.batch(torch.arange(5)).inputs
    assert shape.special == [3, 3, 3]
    assert (ids[mask == 0] == 3).all()
    assert (mask[:, -1] == 1).all()
    assert (mask[:, 0] == 0).all()
    told = replace(shape, labels=None)
    model = task("texts").build(told, source)
    units = cut_model(model, meta_of([ids, mask]), task("texts").weight_loader(source, 0))
    assert units.units[-1].asks == ("input_ids",)
    whole = filled("texts", shape, source, 0)
    with torch.no_grad():
        assert whole(ids, attention_mask=mask).logits.shape == (5, 3)


def test_images_with_a_vit_of_ones_own(tmp_path: Path) -> None:
    """The images have the size and colours of the model's image processor."""
    folder = write_image_classifier(tmp_path / "vit")
    source = Source(data=pictures(tmp_path / "data"), model=str(folder))
    assert task("images").preflight(source) is None
    data, shape = task("images").load(source)
    assert (shape.image_size, shape.classes, shape.labels) == (64, 2, ("cats", "dogs"))
    (images,) = data.validation.batch(torch.arange(2)).inputs
    plain, _ = task("images").load(Source(data=source.data, pretrained=False, image_size=64))
    (between,) = plain.validation.batch(torch.arange(2)).inputs
    mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    assert torch.allclose(images, ((between + 1) / 2 - mean) / deviation, atol=1e-5)
    model = filled("images", shape, source)
    assert model.config.id2label == {0: "cats", 1: "dogs"}
    assert model(images).logits.shape == (2, 2)


@pytest.mark.parametrize("name", ["resnet", "mobilenet_v2"])
def test_running_statistics_are_the_folders_and_go_on_with_torchs_momentum(name: str, tmp_path: Path) -> None:
    folder = write_image_classifier(tmp_path / name, name)
    saved = load_file(folder / "model.safetensors")
    changed = {key: tensor + 1 if "running" in key else tensor for key, tensor in saved.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    source = Source(data=pictures(tmp_path / "data"), model=str(folder), image_size=64)
    _, shape = task("images").load(source)
    model = task("images").build(shape, source)
    whole = cut_model(model, meta_of([torch.zeros(2, 3, 64, 64)]), task("images").weight_loader(source, 0))
    whole.load_own(whole.units)
    norms = {path: module for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    for path, norm in norms.items():
        assert torch.equal(norm.running_mean, changed[f"{path}.running_mean"])
        assert norm.momentum == BATCH_NORM_MOMENTUM
    assert norms


def test_public_tasks_take_a_model_too(tmp_path: Path) -> None:
    bert = write_text_classifier(tmp_path / "bert")
    source = Source(data=write_glue(tmp_path / "glue", "rte"), model=str(bert), tokens=32)
    task("rte").preflight(source)
    data, shape = task("rte").load(source)
    assert (len(data.train.batch(torch.arange(2)).inputs), shape.classes) == (3, 2)
    resnet = write_image_classifier(tmp_path / "resnet", "resnet")
    source = Source(data=write_fashion_mnist(tmp_path / "fashion"), model=str(resnet), image_size=48)
    task("fashion-mnist").preflight(source)
    data, shape = task("fashion-mnist").load(source)
    (images,) = data.train.batch(torch.arange(2)).inputs
    assert images.shape == (2, 3, 48, 48)
    assert filled("fashion-mnist", shape, source)(images).logits.shape == (2, 10)


def test_random_weights_of_a_named_model(tmp_path: Path) -> None:
    folder = write_text_classifier(tmp_path / "bert")
    (folder / "model.safetensors").unlink()
    source = Source(data=rows(tmp_path), model=str(folder), tokens=16, pretrained=False)
    task("texts").preflight(source)
    _, shape = task("texts").load(source)
    assert filled("texts", shape, source).bert.embeddings.word_embeddings.weight.std() > 0


def test_a_model_from_scratch_by_its_type(tmp_path: Path) -> None:
    """Its vocabulary is the tokenizer's; of images no more need be known."""
    tokenizer = write_text_classifier(tmp_path / "bert")
    sizes = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
    source = Source(data=rows(tmp_path), config="bert", config_set=sizes, tokenizer=str(tokenizer), tokens=16)
    task("texts").preflight(source)
    _, shape = task("texts").load(source)
    model = filled("texts", shape, replace(source, tokenizer=None))  # as a server, which has no tokenizer
    assert model.bert.embeddings.word_embeddings.weight.shape[0] == shape.vocabulary < 100
    refused("texts", replace(source, tokenizer=None), "the model type bert has no tokenizer: name one with tokenizer")
    sizes = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
    source = Source(data=pictures(tmp_path / "data"), config="vit", config_set=sizes)
    task("images").preflight(source)
    data, shape = task("images").load(source)
    assert data.train.batch(torch.arange(2)).inputs[0].shape == (2, 3, 32, 32)
    assert filled("images", shape, source).config.num_labels == 2


def two_units() -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(3 * 16 * 16, 2)]


def test_a_function_makes_the_model(tmp_path: Path) -> None:
    name = f"{__name__}:two_units"
    source = Source(data=pictures(tmp_path / "data"), model=name, image_size=16)
    task("images").preflight(source)
    _, shape = task("images").load(source)
    assert len(task("images").build(shape, source)) == 2
    assert task("images").weight_loader(source, 0) is None
    refused("images", replace(source, image_size=8), r"should make logits \[N, 2\] of samples; .* they raise")
    fashion = Source(data=write_fashion_mnist(tmp_path / "fashion"), model=name, image_size=16)
    refused("fashion-mnist", fashion, r"should make logits \[N, 10\] of samples; .* they return \[2, 2\]")


def change(folder: Path, file: str = "config.json", **facts: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.parametrize(
    ("spoil", "given", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), {}, "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), {}, "has no model.safetensors"),
        (lambda folder: change(folder, model_type="vit"), {}, "classifiers of text .* describes a 'vit'"),
        (lambda folder: change(folder, vocab_size=7), {}, "they are not of one model"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), {}, "a tokenizer"),
        (lambda folder: None, {"tokens": 65}, "up to 64 tokens; got tokens 65"),
        (lambda folder: None, {"width": 0.5}, "not width: a model that is named has its own size"),
        (lambda folder: None, {"weights": Path("w")}, "not weights"),
    ],
)
def test_texts_and_models_that_do_not_fit_are_one_line(
    spoil: Callable[[Path], object], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_text_classifier(tmp_path / "bert")
    spoil(folder)
    refused("texts", Source(**{"data": rows(tmp_path), "model": str(folder), "tokens": 16} | given), message)


@pytest.mark.parametrize(
    ("spoil", "given", "message"),
    [
        (lambda folder: None, {"image_size": 48}, r"does not take images of 48 x 48 pixels .*: Input image size"),
        (lambda folder: change(folder, num_channels=1), {}, "does not take images of 64 x 64 .* channel"),
        (lambda folder: change(folder, model_type="bert"), {}, "classifiers of images .* describes a 'bert'"),
        (
            lambda folder: change(folder, "preprocessor_config.json", size={"height": 64, "width": 32}),
            {},
            "thinpipe makes square ones",
        ),
        (
            lambda folder: change(folder, "preprocessor_config.json", image_std=[1, 0, 1]),
            {},
            "image_std as three numbers",
        ),
        (lambda folder: (folder / "preprocessor_config.json").write_text("[]"), {}, "it is no object"),
    ],
)
def test_images_and_models_that_do_not_fit_are_one_line(
    spoil: Callable[[Path], object], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_image_classifier(tmp_path / "vit")
    spoil(folder)
    refused("images", Source(**{"data": pictures(tmp_path / "data"), "model": str(folder)} | given), message)


def refused(name: str, source: Source, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        checked(name, source)
    assert len(str(error.value).splitlines()) == 1


def checked(name: str, source: Source) -> None:
    """Before there are workers, and then on the client."""
    task(name).preflight(source)
    task(name).load(source)
