"""Units of known models: put together they compute the model, and the same as the traced units."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from thinpipe.pipeline.partition import Layout, StageModule, choose_cuts, cut_units
from thinpipe.train.engines.units import cut
from thinpipe.train.models.sequential import unit_names, units_of

transformers = pytest.importorskip("transformers")


def mobilenet() -> nn.Module:
    config = transformers.MobileNetV2Config(num_labels=10, classifier_dropout_prob=0.0)
    return transformers.MobileNetV2ForImageClassification(config)


def roberta() -> nn.Module:
    config = transformers.RobertaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
    )
    return transformers.RobertaForSequenceClassification(config).eval()


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


def chain(modules: list[StageModule], *values: torch.Tensor) -> torch.Tensor:
    for module in modules:
        output = module(*values)
        values = output if isinstance(output, tuple) else (output,)
    return output


def test_mobilenet_has_twenty_units_and_the_seeds_messages() -> None:
    model = mobilenet()
    units = units_of(model)
    assert len(units) == 20
    assert sum(p.numel() for u in units for p in u.parameters()) == sum(p.numel() for p in model.parameters())
    cuts = choose_cuts(20, 2, "client-server", client_layers=(1, 1))
    first, middle, last = cut_units(units, cuts)
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        sent = first(x)
        returned = middle(sent)
        assert sent.shape == (2, 32, 112, 112)
        assert returned.shape == (2, 1280, 7, 7)
        assert last(returned).shape == (2, 10)


def test_units_are_named_after_their_place_in_the_model() -> None:
    model = mobilenet()
    names = unit_names(model, units_of(model))
    assert names[:3] == ("conv_stem.first_conv", "conv_stem.reduce_1x1", "layer.0")
    assert names[-3:] == ("layer.15", "conv_1x1", "classifier")
    model = roberta()
    layers = ("encoder.layer.0", "encoder.layer.1", "encoder.layer.2")
    assert unit_names(model, units_of(model)) == ("embeddings", *layers, "classifier")
    sequence = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    assert unit_names(sequence, units_of(sequence)) == ("Linear", "Tanh")


@pytest.mark.parametrize(("make", "count"), [(mobilenet, 20), (resnet, 5)], ids=["mobilenet", "resnet"])
def test_stages_compute_the_model(make: object, count: int) -> None:
    torch.manual_seed(0)
    model = make().eval()  # type: ignore[operator]
    units = units_of(model)
    assert len(units) == count
    x = torch.randn(2, 3, 32, 32)
    expected = model(x).logits
    torch.testing.assert_close(chain(cut_units(units, choose_cuts(count, 3)), x), expected)


@pytest.mark.parametrize("layout", ["linear", "client-server"])
def test_roberta_stages_compute_the_model_with_its_mask(layout: Layout) -> None:
    torch.manual_seed(0)
    model = roberta()
    ids = torch.randint(3, 50, (4, 12))
    mask = (torch.arange(12)[None] < torch.tensor([[12], [7], [5], [1]])).long()
    ids[mask == 0] = model.config.pad_token_id  # type: ignore[union-attr]
    units = units_of(model)
    assert len(units) == 5
    modules = cut_units(units, choose_cuts(5, 2, layout))
    torch.testing.assert_close(chain(modules, ids, mask), model(ids, attention_mask=mask).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [mobilenet, resnet, roberta])
def test_traced_units_compute_the_same_bits(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    if make is roberta:
        inputs = {"input_ids": torch.randint(3, 50, (4, 12)), "attention_mask": torch.ones(4, 12, dtype=torch.int64)}
        inputs["attention_mask"][1:3, 7:] = 0
    else:
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    listed, traced = (chain([StageModule(units)], *inputs.values()) for units in (units_of(model), cut(model, inputs)))
    assert torch.equal(listed, traced)
