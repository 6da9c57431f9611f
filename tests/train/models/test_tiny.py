"""Small copies of configurations keep what makes a model special."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    JambaConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3MoeConfig,
)

from thinpipe.train.models.pretrained import check_cut
from thinpipe.train.models.tiny import LAYERS, shrunken

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}


def built(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_large_model_becomes_small_and_runs() -> None:
    large = LlamaConfig(hidden_size=16384, num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8)
    model = built(shrunken(large))
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    assert model.config.num_hidden_layers == LAYERS
    assert model(torch.randint(10, 100, (1, 12))).logits.isfinite().all()
    assert large.hidden_size == 16384


@pytest.mark.parametrize(("queries", "keys", "left"), [(32, 32, 4), (32, 8, 2), (32, 1, 1)])
def test_keys_are_shared_as_they_were(queries: int, keys: int, left: int) -> None:
    small = shrunken(LlamaConfig(num_attention_heads=queries, num_key_value_heads=keys))
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, left)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_model_of_few_heads_can_be_cut(heads: int) -> None:
    for model_type, keys in (("llama", {"num_key_value_heads": heads}), ("gpt2", {})):
        config = AutoConfig.for_model(model_type, num_attention_heads=heads, hidden_size=32 * heads, **keys)
        check_cut(config, AutoModelForCausalLM.from_config, "causal")


def test_rotary_embeddings_caps_and_ties_stay() -> None:
    small = shrunken(LlamaConfig(rope_parameters=YARN, tie_word_embeddings=True, max_position_embeddings=32768))
    assert small.rope_parameters["rope_type"] == "yarn"
    assert (small.rope_parameters["factor"], small.rope_parameters["rope_theta"]) == (4.0, 5e5)
    assert small.tie_word_embeddings
    small = shrunken(Gemma2Config(attn_logit_softcapping=33.0, sliding_window=4096))
    assert (small.attn_logit_softcapping, small.sliding_window) == (33.0, 4)
    assert small.num_attention_heads * small.head_dim != small.hidden_size  # as Gemma's


def test_factors_of_every_dimension_fit_the_smaller_heads() -> None:
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    large = Phi3Config(
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
    )
    model = built(shrunken(large))
    assert model.config.rope_parameters["rope_type"] == "longrope"
    assert model(torch.randint(10, 100, (1, 12))).logits.isfinite().all()


def test_one_layer_of_every_sort_stays() -> None:
    gemma = shrunken(Gemma3TextConfig(num_hidden_layers=62))
    assert set(gemma.layer_types) == {"sliding_attention", "full_attention"}
    jamba = shrunken(JambaConfig())
    assert len(set(jamba.layers_block_type)) == 2
    mixed = shrunken(Qwen3MoeConfig(mlp_only_layers=[0, 1], num_hidden_layers=48))
    assert 0 < len(mixed.mlp_only_layers) < mixed.num_hidden_layers


def test_experts_and_special_tokens_fit() -> None:
    tokens = {"bos_token_id": 1, "eos_token_id": [31999, 31990], "pad_token_id": 31998, "vocab_size": 32000}
    small = shrunken(MixtralConfig(num_local_experts=64, num_experts_per_tok=6, **tokens))
    assert (small.num_local_experts, small.num_experts_per_tok) == (4, 2)
    assert (small.bos_token_id, small.eos_token_id, small.pad_token_id) == (1, [125, 127], 126)
    assert small.vocab_size == 128
    assert small.attention_dropout == 0
