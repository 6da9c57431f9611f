"""Models of the benchmarks: of any size, and cut as pipelines cut them."""

import pytest

from thinpipe.bench.models import CUTTABLE, Shapes, build_cuttable
from thinpipe.pipeline.partition import cut_units
from thinpipe.pipeline.units import units_of

SMALL = Shapes(batch_size=2, image_size=32, tokens=8, width=0.25, hidden=32, layers=2)


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CUTTABLE)
def test_whole_and_cut_models_have_a_loss(name):
    workload = build_cuttable(name, SMALL)
    whole = cut_units(units_of(workload.model), ())[0]
    assert workload.loss(whole(*workload.inputs), workload.target).isfinite()
    assert size(whole) <= size(workload.model)


def test_a_narrow_roberta_keeps_its_proportions():
    def share(hidden):
        model = build_cuttable("roberta", Shapes(batch_size=1, image_size=32, tokens=8, hidden=hidden)).model
        return size(model.roberta.embeddings.word_embeddings) / size(model.roberta.encoder)

    assert share(64) == pytest.approx(39 / 85, rel=0.05)  # RoBERTa-base: 39 million of embeddings, 85 of layers
