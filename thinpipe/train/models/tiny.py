"""Small copies of model configs: narrow and shallow, with everything that makes a model special kept.

Sizes are recognized by name; transformers has many names for few ideas (``_RULES``). Fields that are not sizes (rotary
embeddings, soft caps, tied weights) stay as they are. Windows become shorter than the test sequences. Four layers stay,
at least one of every kind. Exceptions that no rule covers are in ``_CORRECTIONS``, by model type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

LAYERS = 4  # enough for two layers of each of two kinds
HEADS, HEAD, HIDDEN, WIDE = 4, 16, 64, 96  # a quarter of a head is still a pair of dimensions to rotate
VOCABULARY, POSITIONS, WINDOW, RANK = 128, 64, 4, 8
ORDINARY_TOKENS = range(10, 100)  # token ids without a special meaning in a small copy

Values = dict[str, Any]


def shrunken(config: Any) -> Any:
    """Return a small copy of a transformers config."""
    made = type(config)(**_shrunken(config.to_dict()))
    made._attn_implementation = config._attn_implementation
    return made


def _shrunken(values: Values) -> Values:
    """Return the same for a config as a dictionary, including nested configs."""
    kept = _kept_layers(values)
    small = {name: _small(name, value, values, kept) for name, value in values.items() if name not in _LEFT_OUT}
    return small | _CORRECTIONS.get(values.get("model_type", ""), {})


def _small(name: str, value: Any, values: Values, kept: list[int]) -> Any:
    layers = _layers(values)
    if isinstance(value, bool) or name in ("id2label", "label2id"):
        return value
    if value is None:  # some models compute these, some fail
        return {"head_dim": HEAD, "num_key_value_heads": HEADS}.get(name)
    if name == "per_layer_config":
        return _per_layer(value, values, kept)
    if isinstance(value, dict):
        return _small_rope(value, values) if name.startswith("rope") else _shrunken(value)
    if isinstance(value, float):
        return 0.0 if _DROPS.search(name) else value
    if isinstance(value, list):
        if _is_index_list(name, value, layers):
            return [kept.index(number) for number in value if number in kept]
        if layers > 1 and len(value) == layers:
            return [_small(name, value[number], values, kept) for number in kept]
        return _small_list(name, value, values)
    return _small_size(name, value, values) if isinstance(value, int) else value


# How weights are stored, and which stages a backbone returns.
_LEFT_OUT = ("quantization_config", "out_features", "out_indices", "_out_features", "_out_indices", "stage_names")
_DROPS = re.compile(r"drop")

# Layers

_LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|attention_layers|num_blocks|depth)$")
_INDEX_LIST = re.compile(r"(layers|layer_ids|idxs|indexes|indices)$")


def _layers(values: Values) -> int:
    """Return the number of layers; 0 for a config without layers."""
    found = [value for name, value in values.items() if _LAYERS.match(name) and type(value) is int]
    lists = [value for name, value in values.items() if name in ("layer_types", "layers_block_type")]
    return found[0] if found else len(lists[0]) if lists and lists[0] else 0


def _kept_layers(values: Values) -> list[int]:
    """Return the layers that stay: the first of every kind, the last one, then those that follow."""
    layers = _layers(values)
    first: dict[Any, int] = {}
    for number in range(layers):
        first.setdefault(_sort_of(number, values, layers), number)
    kept = list(first.values())[:LAYERS]
    later = [layers - 1, *range(max(kept, default=-1) + 1, layers), *range(layers)] if layers else []
    kept += [number for number in dict.fromkeys(later) if number not in kept]
    return sorted(kept[:LAYERS])


def _sort_of(number: int, values: Values, layers: int) -> tuple[Any, ...]:
    """Return a key of a layer's kind, from every list that covers all layers or names some by number."""
    sort: list[Any] = []
    for name, value in values.items():
        if isinstance(value, list) and _is_index_list(name, value, layers):
            sort.append(number in value)
        elif isinstance(value, list) and len(value) == layers:
            sort.append(str(value[number]))
        elif name == "per_layer_config":
            sort.append(str(_overrides(value).get(number)))
    return tuple(sort)


def _is_index_list(name: str, value: list[Any], layers: int) -> bool:
    return (
        bool(_INDEX_LIST.search(name))
        and all(type(item) is int and 0 <= item < layers for item in value)
        and len(set(value)) == len(value)
    )


def _overrides(per_layer: Mapping[Any, Any] | None) -> dict[int, Values]:
    return {int(number): values for number, values in (per_layer or {}).items()}


def _per_layer(value: Any, values: Values, kept: list[int]) -> Any:
    """Return the overrides of some layers, with the original ratio to the model's sizes."""

    def small(name: str, own: Any) -> Any:
        return max(1, _small_size(name, values[name], values) * own // values[name]) if type(own) is int else own

    given = _overrides(value)
    layers = {new: given[old] for new, old in enumerate(kept) if old in given}
    return {new: {name: small(name, own) for name, own in layer.items()} for new, layer in layers.items()}


# Sizes


def _at_most(limit: int) -> Callable[[int, Values], int]:
    return lambda value, values: min(value, limit)


_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")


def _small_heads(value: int, values: Values) -> int:
    """Return the number of heads: one and two stay; three would not divide the width."""
    return HEADS if value == 3 == _first(values, *_HEADS) else min(value, HEADS)


def _small_key_heads(value: int, values: Values) -> int:
    """Return the number of key-value heads: as many as query heads, one, or some in between, as in the original."""
    heads = _first(values, *_HEADS, "linear_num_value_heads")
    return _small_heads(value, values) if value == heads else min(value, HEADS // 2)


def _small_head(value: int, values: Values) -> int:
    """Return the head size: the heads together are as wide as the model if they were before, else twice as wide."""
    rope, nope = values.get("qk_rope_head_dim"), values.get("qk_nope_head_dim")
    if rope is not None:
        return 2 * HEAD if nope is not None and value == rope + nope and value != rope else HEAD
    heads = _first(values, *_HEADS)
    hidden = _first(values, "hidden_size", "d_model", "n_embd", "dim")
    return HEAD if heads is None or hidden is None or heads * value == hidden else 2 * HEAD


def _small_hidden(value: int, values: Values) -> int:
    """Return a width: the same small multiple of the model's width as before, or half of it if it was narrower."""
    heads = values.get("num_heads")
    if isinstance(heads, list):
        return HEAD * heads[0]
    hidden = _first(values, "hidden_size", "d_model", "n_embd", "dim") or value
    if value % hidden == 0 and value // hidden <= 4:
        return HIDDEN * (value // hidden)
    return HIDDEN // 2 if value < hidden else HIDDEN


def _small_token(value: int, values: Values) -> int:
    """Return a special token's id: small ids stay, the rest move to the end of the vocabulary and remain distinct."""
    if value < ORDINARY_TOKENS.start:
        return value
    given = [each for name, each in values.items() if re.search(_TOKEN, name)]
    tokens = {token for each in given for token in (each if isinstance(each, list) else [each])}
    large = sorted(token for token in tokens if type(token) is int and token >= ORDINARY_TOKENS.start)
    return min(_first(values, "vocab_size") or VOCABULARY, VOCABULARY) - 1 - large.index(value)


def _first(values: Values, *names: str) -> int | None:
    return next((value for name in names if type(value := values.get(name)) is int), None)


_TOKEN = r"token_(id|index)$|_pad_id$"
# Name pattern -> the value of an integer of that name; the first match applies.
_RULES: tuple[tuple[str, Callable[[int, Values], int]], ...] = (
    (r"^type_vocab|^task_type", _at_most(16)),
    (r"vocab", _at_most(VOCABULARY)),
    (_TOKEN, _small_token),
    (r"^index_topk$", _at_most(WINDOW)),
    (r"per_tok|top_?k|^moe_k$", _at_most(2)),
    (r"n_group$|expert_group$|n_groups$", _at_most(2)),
    (r"topk_group$", _at_most(1)),
    (r"experts?$|expert_num$", _at_most(4)),
    (r"mamba\w*_heads$", _at_most(2 * HIDDEN // HEAD)),
    (r"qk_head_dim$|index(er)?_head_dim$", _at_most(2 * HEAD)),
    (r"(qk_\w+|v)_head_dim$|mamba\w*head_?dim$|mamba_d_head$|^linear\w*head_dim$", lambda value, values: HEAD),
    (r"head_?dim$|d_head$|dim_head$|d_kv$|kv_channels$|attention_head_size$", _small_head),
    (r"kv_heads$|key_value_heads$|kv_n_heads$|num_query_groups$|num_key_heads$", _small_key_heads),
    (r"heads?$", _small_heads),
    (
        r"intermediate(_size)?(_mlp)?$|ffn_\w*(dim|size)$|d_ff$|^dff$|dim_ff$|feed_forward_size$|d_inner$|mlp_dim$",
        _at_most(WIDE),
    ),
    (r"^mamba_d_ssm$", _at_most(2 * HIDDEN)),
    (
        r"hidden_size|hidden_dim$|d_model$|n_embd$|^dim$|emb(ed)?(ding)?_(dim|size|proj_dim)$|lru_width$|d_latents$"
        r"|bottleneck_size$",
        _small_hidden,
    ),
    (r"rank$|lowrank$", _at_most(RANK)),
    (r"state(_size)?$", _at_most(RANK)),
    (r"position|n_ctx$|max_seq_len$|model_max_length$|context_length$", _at_most(POSITIONS)),
    (r"window|local_attention$|chunk_size$|chunk_length$|block_size$|floor_scale$", _at_most(WINDOW)),
    (r"rotary_dim$", _at_most(HEAD // 2)),
    (r"_period$|_interval$|every_n_layers$|_pattern$|_step$|layer_group_size$|kv_shared_layers$", _at_most(2)),
    (r"_offset$|first_k_dense_replace$|num_dense_layers$", _at_most(1)),
    (r"layers$|^n_layers?$|^num_blocks$|^depth$", _at_most(LAYERS)),
)


def _small_size(name: str, value: int, values: Values) -> int:
    for pattern, rule in _RULES:
        if re.search(pattern, name):
            return rule(value, values)
    if name == "image_size":
        patch = values.get("patch_size")
        return min(value, 4 * patch if type(patch) is int and patch >= 8 else 64)
    return value


def _small_list(name: str, value: list[Any], values: Values) -> list[Any]:
    if name == "eos_token_id":
        return [_small_token(item, values) for item in value]
    if _DROPS.search(name) and all(isinstance(item, float) for item in value):
        return [0.0 for _ in value]
    if not value or not all(type(item) is int for item in value):
        return value
    if re.search(r"depths$|^depth$|block_sizes$|^num_block_repeats$|stage_num_blocks$", name):
        return [min(item, 2) for item in value]
    if re.search(r"hidden_sizes$|embed_dims?$", name) and value[0] > HEAD:
        return [-(-item * HEAD // value[0] // 8) * 8 for item in value]
    if name == "image_size":
        return [min(item, 64) for item in value]
    return value


def _small_rope(rope: Values, values: Values) -> Values:
    """Return rotary embedding parameters unchanged, except for lists with a number per pair of head dimensions."""
    given = _first(values, "head_dim")
    head = HEAD if given is None else _small_head(given, values)

    def small(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _small_rope(value, values)
        if name == "mrope_section":
            return [head // 2 - 2 * (head // 8), head // 8, head // 8]
        if name in ("short_factor", "long_factor"):
            return value[: int(head * rope.get("partial_rotary_factor", 1)) // 2]
        return min(value, POSITIONS // 4) if name == "original_max_position_embeddings" else value

    return {name: small(name, value) for name, value in rope.items()}


# Model type -> values that no rule covers.
_CORRECTIONS: dict[str, Values] = {
    "bit": {"num_groups": 4},
    "blt_local_encoder": {"hidden_size_global": HIDDEN},
    "blt_local_decoder": {"hidden_size_global": HIDDEN},
    "cvt": {"depth": [1, 2, 3]},  # stage n uses the nth of its drop rates
    "donut-swin": {"window_size": 2},  # no wider than the last stage
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "hgnet_v2": {
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 32, 48, 64],
        "stage_mid_channels": [8, 8, 16, 16],
        "stage_out_channels": [32, 48, 64, 96],
        "hidden_sizes": [32, 48, 64, 96],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},  # a position is four of the first and two of the second
    "lilt": {"hidden_size": 96},  # six parts make a position
    "reformer": {"axial_pos_embds_dim": [HIDDEN // 2, HIDDEN // 2], "axial_pos_shape": [3, 4]},
    "swin": {"window_size": 2},
    "textnet": {"stem_out_channels": HEAD},
    "xlstm": {"chunk_size": 16},  # with several chunks, its code needs keys as wide as values
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},  # its hybrid layers share weights
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
}
