"""Models that compute packed texts as each alone are told from those that do not, by comparing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinpipe.train.models.packed import can_pack, positions
from thinpipe.train.models.pretrained import PretrainedModel
from thinpipe.train.models.tiny import shrunken

# Model type -> its own code packs: bloom has no positions, mamba a state, opt counts what a mask has.
TYPES = {"llama": True, "gpt2": True, "bloom": False, "mamba": False, "opt": False}


@pytest.mark.parametrize("name", TYPES)
def test_models_that_can_pack(name: str) -> None:
    assert PretrainedModel(None, "causal", model_type=name, has_weights=False).can_pack() is TYPES[name]


def test_flash_attention_does_not_pack_batches() -> None:
    assert not PretrainedModel(
        None, "causal", model_type="llama", has_weights=False, attention="flash_attention_2"
    ).can_pack()


def test_a_model_that_ignores_positions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_config(shrunken(AutoConfig.for_model("llama")))
    inner = model.model.forward

    def forward(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    assert can_pack(model)
    monkeypatch.setattr(model.model, "forward", forward)
    assert not can_pack(model)


def test_positions_restart() -> None:
    assert positions([3, 1, 2], 8).tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
    assert positions([4], 4).dtype == torch.int64
