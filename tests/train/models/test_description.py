"""Descriptions of models from elsewhere name no code, and nothing without end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinpipe.options import OptionError
from thinpipe.train.models.description import read_description
from thinpipe.train.models.pretrained import PretrainedModel

NESTED: Any = {"text_config": "evil/kernel"}
for _ in range(300):
    NESTED = {"a": [NESTED]}


def written(folder: Path, **facts: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": "llama"} | facts))
    return file


@pytest.mark.parametrize(
    "facts",
    [
        {"attn_implementation": "evil/kernel"},
        {"attn_implementation": "msa|evil/kernel@v1:function"},
        {"_attn_implementation": "evil/kernel"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"experts_implementation": "evil/kernel"},
        {"attn_implementation": {"text_config": "evil/kernel"}},
        {"attn_implementation": {"text_config": {"": "evil/kernel"}}},
        {"text_config": {"attn_implementation": "evil/kernel"}},
        {"encoders": [{"attn_implementation": "evil/kernel"}]},
        {"attn_implementation": NESTED},
    ],
)
def test_kernels_of_the_hub_are_code(tmp_path: Path, facts: dict[str, Any]) -> None:
    file = written(tmp_path, **facts)
    with pytest.raises(OptionError, match=r'"[^"]*evil/kernel[^"]*" is code of the hub, .* trust_remote_code'):
        read_description(file, trusted=False)
    assert read_description(file, trusted=True)["model_type"] == "llama"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"text_config": {"auto_map": {"AutoModel": "code.Model"}}}, "comes with it, .* trust_remote_code"),
        ({"configuration_files": ["config.5.0.0.json"]}, "names other descriptions"),
    ],
)
def test_other_code_is_none_either(tmp_path: Path, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_description(written(tmp_path, **facts), trusted=False)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flash_attention_2", None, {"": "sdpa"}])
def test_implementations_of_the_library_are_none(tmp_path: Path, implementation: Any) -> None:
    assert read_description(written(tmp_path, attn_implementation=implementation), trusted=False)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"text_config": {"n_layer": 10**9}}, "n_layer"),
        ({"depths": [2, 10**9]}, "depths"),
        ({"num_local_experts": 10**9}, "num_local_experts"),
    ],
)
def test_counts_of_modules_have_an_end(tmp_path: Path, facts: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {name} is at most 20000, got 1000000000; "):
        read_description(written(tmp_path, **facts), trusted=False)


def test_so_have_those_that_a_user_changes() -> None:
    model = PretrainedModel(None, "causal", model_type="qwen2", changes={"num_hidden_layers": 10**9})
    with pytest.raises(ValueError, match="config_set: num_hidden_layers is at most 20000"):
        model.config()


def test_a_tensor_that_no_machine_can_hold_is_named_before_it_is_made() -> None:
    model = PretrainedModel(None, "causal", model_type="llama", changes={"vocab_size": 10**12}, has_weights=False)
    with pytest.raises(OptionError, match=r"its tensor \S+ takes 16\.38 PB or more, and this machine has "):
        model.check_weights()
    PretrainedModel(None, "causal", model_type="llama", has_weights=False).check_weights()
