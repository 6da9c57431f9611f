"""Any model of transformers as units, for stages of your own: each takes what the one before it returns.

python examples/cut_a_model.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import thinpipe

config = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, vocab_size=512)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(512, (2, 16))
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

values = tuple(inputs.values())
for unit in thinpipe.cut(model, inputs):
    found = unit(*values)
    values = found if isinstance(found, tuple) else (found,)
    print(f"{type(unit).__name__:5} returns {', '.join(str(list(value.shape)) for value in values)}")
print(f"largest difference to the whole model: {(values[0] - model(**inputs).logits).abs().max():.1e}")
