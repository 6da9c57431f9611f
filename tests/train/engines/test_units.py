"""Models as units: what they share, and what stays with the client."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import thinpipe
from thinpipe.pipeline.partition import StageModule
from thinpipe.train.engines.units import Meta, check_private, check_shared

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
}


def test_weights_at_both_ends_belong_to_one_worker() -> None:
    first, middle, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    check_shared([first, middle, last], workers=2)  # client and server: the client has both ends
    with pytest.raises(ValueError, match="tied embeddings"):
        check_shared([first, middle, last], workers=3)


class Asking(nn.Linear):
    asks = ("input_ids",)


def test_inputs_stay_with_workers_that_have_the_data() -> None:
    """The client has the first and the last stage; at the end of a line are the labels, and so all the data."""
    plain, asking, states = nn.Linear(4, 4), Asking(4, 4), (Meta((2, 4), torch.float32),)
    check_private([StageModule([plain]), StageModule([plain]), StageModule([plain, asking])], [states] * 4)
    check_private([StageModule([plain, asking]), StageModule([plain])], [states] * 3)
    with pytest.raises(ValueError, match="input_ids in layers that stage 1 has, so tokens or images would travel"):
        check_private([StageModule([plain]), StageModule([asking]), StageModule([plain])], [states] * 4)
    with pytest.raises(ValueError, match="would travel"):  # a first block that is given the images themselves
        check_private([StageModule([plain]), StageModule([asking])], [states, (), states])


def test_a_stage_passes_side_inputs_to_its_units() -> None:
    class Adding(nn.Module):
        asks = ("input_ids",)

        def forward(self, states: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
            return states + input_ids

    stage = StageModule([nn.Identity(), Adding()])
    assert stage.asks == {"input_ids"}
    assert stage(torch.ones(2), input_ids=torch.tensor([1, 2])).tolist() == [2, 3]


def test_the_units_of_a_program_are_its_modules() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
    assert thinpipe.cut(layers) == thinpipe.cut(nn.Sequential(*layers)) == layers


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Bilinear(3, 3, 3), "those of transformers, nn.Sequential, and lists of modules; got Bilinear"),
        ([nn.ReLU(), 3], "units are modules, one or more; got int"),
        ([], "one or more; got none"),
        (LlamaForCausalLM(LlamaConfig(**SIZES)), "LlamaForCausalLM is cut by its forward: give an example"),
    ],
    ids=["module", "number", "empty", "no example"],
)
def test_models_that_cannot_be_cut(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        thinpipe.cut(model)


def test_the_units_of_a_model_of_transformers_share_its_parameters() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    inputs = {"input_ids": torch.randint(50, (2, 7)), "attention_mask": torch.tensor([[1] * 7, [0] * 3 + [1] * 4])}
    values: tuple[torch.Tensor, ...] = tuple(inputs.values())
    units = thinpipe.cut(model, inputs)
    for unit in units:
        found = unit(*values)
        values = found if isinstance(found, tuple) else (found,)
    assert torch.equal(values[0], model(**inputs).logits)
    assert {id(each) for unit in units for each in unit.parameters()} == {id(each) for each in model.parameters()}


def test_dropout_is_off_in_evaluation() -> None:
    """GPT-2 drops parts of its embeddings: in a module without weights, which no unit has."""
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=8, embd_pdrop=0.5)
    model, ids = GPT2LMHeadModel(config).train(), torch.arange(16).view(2, 8)
    units = thinpipe.cut(model, {"input_ids": ids})
    for training in (False, True):
        for unit in units:
            unit.train(training)
        once, again = (functools.reduce(lambda values, unit: _tuple(unit(*values)), units, (ids,)) for _ in range(2))
        assert torch.equal(once[0], again[0]) is not training


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
