"""Models of the benchmarks: of any size, and cut as pipelines cut them."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from thinpipe.lab.bench.models import CUTTABLE, Shapes, build_cuttable, build_named
from thinpipe.lab.bench.pipeline.pipeline_options import PipelineBenchOptions
from thinpipe.pipeline.partition import cut_units
from thinpipe.train.engines.loss import Loss
from thinpipe.train.engines.units import cut_model, meta_of
from thinpipe.train.models.sequential import units_of

SMALL = Shapes(batch_size=2, image_size=32, tokens=8, width=0.25, hidden=32, layers=2)


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CUTTABLE)
def test_complete_and_cut_models_have_a_loss(name):
    model, batch = build_cuttable(name, SMALL)
    complete = cut_units(units_of(model), ())[0]
    assert Loss(None, device=torch.device("cpu"))(complete(*batch.inputs), batch.labels).isfinite()
    assert size(complete) <= size(model)


@pytest.mark.parametrize("name", ["type", "function"])
def test_models_of_users_have_random_weights_and_a_loss(name, tmp_path, monkeypatch):
    (tmp_path / "bench_model.py").write_text(
        "from torch import nn\ndef make(): return [nn.Embedding(90, 8), nn.Linear(8, 90)]"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sizes = "hidden_size=32,num_hidden_layers=3,num_attention_heads=4,intermediate_size=64,vocab_size=90"
    options = {"config": "llama", "config_set": sizes} if name == "type" else {"model": "bench_model:make"}
    settings = PipelineBenchOptions(shapes=SMALL, chunks=(2,), workers=(1, 2), **options)
    settings.check_here()
    model, batch, fill = build_named(settings.source, SMALL)
    units = cut_model(model, meta_of(batch.inputs), fill)
    complete = cut_units(units.units, ())[0]
    units.load_own([complete])
    assert batch.labels.shape == (2, 8)
    with torch.no_grad():
        summed, _ = Loss(units.tail, device=torch.device("cpu")).score(complete(*batch.inputs), batch.labels)
    assert summed / batch.labels.numel() == pytest.approx(math.log(90), abs=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "mlp", "config": "llama"}, "model and config both name the model"),
        ({"config_set": "x=1"}, "config_set overrides values of config: name a model type"),
        ({"model": "no_such.module:f"}, "cannot be imported"),
        ({"config": "vit"}, "causal language models of transformers are trained here"),
    ],
)
def test_names_of_models_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        PipelineBenchOptions(shapes=SMALL, chunks=(2,), **options).check_here()


def test_a_narrow_roberta_keeps_its_proportions():
    def share(hidden):
        model, _ = build_cuttable("roberta", Shapes(batch_size=1, image_size=32, tokens=8, hidden=hidden))
        return size(model.roberta.embeddings.word_embeddings) / size(model.roberta.encoder)

    assert share(64) == pytest.approx(39 / 85, rel=0.05)  # RoBERTa-base: 39 million of embeddings, 85 of layers


def test_the_models_of_tasks_at_published_sizes():
    """Strides and positions are those of the papers, whatever the size of images and texts."""
    shapes = Shapes(batch_size=2, image_size=32, tokens=8)
    mobilenet, batch = build_cuttable("mobilenetv2", shapes)
    assert mobilenet.mobilenet_v2(batch.inputs[0]).last_hidden_state.shape == (2, 1280, 1, 1)
    assert size(mobilenet) == 3_504_872
    roberta, _ = build_cuttable("roberta", replace(shapes, layers=1))
    assert roberta.roberta.embeddings.position_embeddings.weight.shape == (514, 768)


def test_a_hidden_size_that_heads_cannot_share():
    with pytest.raises(ValueError, match="hidden is shared by 3 heads, one for 64 values: 200 is no multiple of 3"):
        build_cuttable("roberta", replace(SMALL, hidden=200))
