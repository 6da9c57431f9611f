"""Models of transformers compute in units what they compute whole, and what would not is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import Qwen2Config, Qwen2ForCausalLM

from thinpipe.train.models.cut import Call, CutModel
from thinpipe.train.models.tiny import shrunken
from thinpipe.train.models.unit_modules import cut_into_units
from thinpipe.train.models.verify import Comparison, batch, build, compare, verify, verify_type

EXACT = [
    ("causal", "llama"),
    ("causal", "gemma2"),  # sliding and full attention, soft caps
    ("causal", "gpt2"),  # learned positions
    ("causal", "mixtral"),  # experts ask which tokens are theirs
    ("causal", "bloom"),  # a bias made of the mask
    ("causal", "opt"),
    ("causal", "bamba"),  # mamba and attention
    ("causal", "gemma4_text"),  # embeddings for every layer
    ("sequence", "bert"),
    ("sequence", "roberta"),
    ("sequence", "gpt2"),  # the last token that is no padding
    ("sequence", "mpnet"),  # a bias for all layers that is learned
    ("sequence", "bart"),  # encoder and decoder
    ("sequence", "biogpt"),  # could be told of which positions logits are wanted, and has none of positions
    ("image", "vit"),
    ("image", "convnext"),
    ("image", "resnet"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "name"), EXACT, ids=lambda value: value)
def test_units_compute_the_same_as_the_model(kind: str, name: str) -> None:
    found = verify_type(kind, name)
    assert (found.outcome, found.reason) == ("exact", "")
    assert found.blocks is not None
    assert found.blocks >= 2


def test_weights_between_blocks_belong_to_a_unit() -> None:
    model, inputs = build("image", "cvt")  # a token for classes in front of its last stage
    units = cut_into_units(CutModel(model, inputs))
    held = {id(parameter) for unit in units for parameter in unit.parameters()}
    assert [name for name, parameter in model.named_parameters() if id(parameter) not in held] == []


def test_side_inputs_of_a_block_are_not_sent() -> None:
    model, inputs = build("image", "pvt_v2")
    cut = CutModel(model, inputs)
    assert [unit.asks for unit in cut_into_units(cut)][:3] == [(), ("pixel_values",), ()]
    assert cut.live[0] == ()


def test_autocast_keeps_no_unknown_weights_for_a_block_that_computes() -> None:
    """For shapes or a device that are not the example's, a unit traces all blocks before it computes."""
    model, inputs = build("causal", "llama")
    units = cut_into_units(CutModel(model, inputs))
    inputs = {name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()}
    values: Tensor | tuple[Tensor, ...] = tuple(inputs.values())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**inputs).logits
    for unit in units:
        unit.cut._kept.clear()  # as on a worker that has this unit alone
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = unit(*values)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(values, expected)


def test_a_process_of_its_own_finds_the_same() -> None:
    (found,) = verify([("causal", "gpt2")], processes=1)
    assert (found.type, found.model, found.outcome) == ("gpt2", "GPT2LMHeadModel", "exact")


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("causal", "hrm_text", "share their weights"),
        ("sequence", "albert", "share their weights"),
        ("causal", "zamba2", "shares weights between blocks"),
        ("causal", "gemma3n_text", "block 3"),  # its last layers take keys of earlier ones from a common dictionary
    ],
)
def test_models_that_cannot_be_cut_are_refused(kind: str, name: str, reason: str) -> None:
    found = verify_type(kind, name)
    assert found.outcome == "refused"
    assert reason in found.reason
    assert "\n" not in found.reason


def test_a_model_that_cannot_be_built_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(kind: str, name: str) -> None:
        raise ImportError("\nGemma requires the timm library but it was\nnot found")

    monkeypatch.setattr("thinpipe.train.models.verify.build", missing)
    found = verify_type("causal", "llama")
    assert (found.outcome, found.reason) == ("not buildable", "needs the library timm")


# Controls: what a block must not be given


def qwen2() -> Qwen2ForCausalLM:
    """Sliding windows in the upper half, tied embeddings."""
    config = Qwen2Config(use_sliding_window=True, max_window_layers=16, tie_word_embeddings=True)
    config = shrunken(config)
    assert config.layer_types.count("sliding_attention") in (1, 2, 3)
    assert config.tie_word_embeddings
    config.pad_token_id = 0
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()


def test_windows_and_tied_embeddings() -> None:
    model = qwen2()
    assert compare(model, batch(model, "causal")).is_exact


def compare_with(change: Callable[[list[Call]], None], monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Compare with something changed in what blocks are called with."""
    whole = CutModel._trace

    def changed(self: CutModel, *args: object) -> object:
        trace = whole(self, *args)
        change(trace.calls)
        return trace

    monkeypatch.setattr(CutModel, "_trace", changed)
    model = qwen2()
    return compare(model, batch(model, "causal"))


def number_of(call: Call, name: str, part: int = 0) -> int:
    """Which leaf an argument is."""
    _, kwargs = pytree.tree_unflatten(range(len(call.leaves)), call.spec)
    return pytree.tree_leaves(kwargs[name])[part]


def replace(call: Call, name: str, made: Callable[[Tensor], Tensor]) -> None:
    number = number_of(call, name)
    assert isinstance(call.leaves[number], Tensor)
    call.leaves[number] = made(call.leaves[number].clone())


def wrong_mask(calls: list[Call]) -> None:
    def padding_is_seen(mask: Tensor) -> Tensor:
        mask[0, :, :, 8:] = mask[2, :, :, 8:]
        return mask

    replace(calls[1], "attention_mask", padding_is_seen)


def wrong_window(calls: list[Call]) -> None:
    full, sliding = calls[0].leaves[number_of(calls[0], "attention_mask")], number_of(calls[-1], "attention_mask")
    assert not torch.equal(full, calls[-1].leaves[sliding])
    calls[-1].leaves[sliding] = full


def wrong_rotation(calls: list[Call]) -> None:
    replace(calls[2], "position_embeddings", lambda cosines: cosines.roll(1, dims=1))


@pytest.mark.parametrize(
    ("change", "block"), [(wrong_mask, 1), (wrong_window, 3), (wrong_rotation, 2)], ids=["mask", "window", "rotation"]
)
def test_a_block_that_is_given_something_wrong_is_noticed(
    change: Callable[[list[Call]], None], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare_with(change, monkeypatch)
    assert not found.is_exact
    assert found.logits > 0
    assert found.gradients > 0
    assert found.first_difference == f"block {block} is called with other values"


def test_a_difference_is_an_outcome_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("causal", "llama")
    monkeypatch.setattr("thinpipe.train.models.verify.build", lambda kind, name: (model, inputs))
    whole = CutModel._trace

    def changed(self: CutModel, *args: object) -> object:
        trace = whole(self, *args)
        wrong_mask(trace.calls)
        return trace

    monkeypatch.setattr(CutModel, "_trace", changed)
    found = verify_type("causal", "llama")
    assert (found.outcome, found.reason) == ("different", "block 1 is called with other values")
