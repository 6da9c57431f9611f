"""Where adapters go, what they begin as, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from thinpipe.train.models.adapters import Lora, adapt, adapter_names
from thinpipe.train.models.tiny import shrunken
from thinpipe.train.models.weights import params_on_meta, random_weights


def built(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(shrunken(AutoConfig.for_model(kind)))


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("llama", ["q_proj", "v_proj"]), ("gpt2", ["c_attn"]), ("mamba", ["dt_proj", "in_proj", "x_proj"])],
)
def test_defaults_of_an_architecture(kind: str, targets: list[str]) -> None:
    adapted = adapt(built(kind), Lora(rank=4), (), 0)
    assert sorted(adapted.config.target_modules) == targets
    assert (adapted.config.lora_alpha, adapted.config.fan_in_fan_out) == (8, kind == "gpt2")


def test_adapters_do_not_depend_on_which_worker_draws_them() -> None:
    whole = adapt(built("llama"), Lora(rank=4), (), seed=5)
    with params_on_meta():
        plain = built("llama")
    part = adapt(plain, Lora(rank=4), (), seed=5)
    load = part.loader(lambda model, names: random_weights(model, names, 5))
    assert load is not None
    mine = [name for name in part.model.state_dict() if ".layers.1." in name]
    load(part.model, mine)
    values, wanted = part.model.state_dict(), whole.model.state_dict()
    assert {name for name, each in values.items() if not each.is_meta} >= set(mine)
    adapters = [name for name in mine if name in adapter_names(part.model)]
    assert len(adapters) == 4
    for name in adapters:
        assert torch.equal(values[name], wanted[name])
        assert values[name].any() == ("lora_A" in name)
    assert all(each.is_meta for name, each in values.items() if ".layers.0." in name)
    load(plain, ["model.layers.0.self_attn.q_proj.base_layer.weight"])
    twin = built("llama")
    random_weights(twin, ["model.layers.0.self_attn.q_proj.weight"], 5)
    base = plain.model.layers[0].self_attn.q_proj.base_layer
    assert torch.equal(base.weight, twin.model.layers[0].self_attn.q_proj.weight)


def test_freezing_in_addition_to_adapters() -> None:
    model = adapt(built("llama"), Lora(rank=4), ("model.layers.0.*",), 0).model
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {name for name in adapter_names(model) if not name.startswith("model.layers.0.")}


def test_units_of_ones_own_have_no_adapters() -> None:
    with pytest.raises(ValueError, match="lora adapts models of transformers, and this is a Sequential: leave it out"):
        adapt(nn.Sequential(nn.Linear(2, 2)), Lora(rank=4), (), 0)
