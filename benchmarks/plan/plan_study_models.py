"""A small Llama with LoRA adapters, as `thinpipe train --lora` makes it, for the study of predictions."""

from __future__ import annotations

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from thinpipe.train.models.adapters import Lora, adapt


def lora() -> nn.Module:
    """Return the model; all weights but those of the adapters are frozen."""
    config = LlamaConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1024,
        max_position_embeddings=512,
    )
    model: nn.Module = adapt(LlamaForCausalLM(config), Lora(rank=8, targets=(), alpha=None, dropout=0.0), (), 0).model
    return model
