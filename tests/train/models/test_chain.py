"""The code after the last block runs as a chain of modules where it is one, with the same bits, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinpipe.train.models.chain import chain_of, recorded
from thinpipe.train.models.cut import CutModel
from thinpipe.train.models.unit_modules import TailUnit

TOKENS = 6


def tail_of(kind: str, **config: Any) -> TailUnit:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads, **config))
    return TailUnit(CutModel(model, {"input_ids": torch.ones(2, TOKENS, dtype=torch.int64)}))


def results(logits: Callable[..., Tensor], states: Tensor, positions: slice | None) -> tuple[Tensor, Tensor]:
    given = states.clone().requires_grad_()
    found = logits(given, positions)
    return found.detach(), torch.autograd.grad(found.square().sum(), given)[0]


@pytest.mark.parametrize("positions", [None, slice(0, TOKENS), slice(1, 4)])
def test_norm_and_head_are_called_without_the_model(positions: slice | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tail, states = tail_of("llama"), torch.randn(2, TOKENS, 16)
    walked = results(lambda given, places: tail._run((given,), places, {}), states, positions)
    first = results(lambda given, places: tail.logits((given,), places), states, positions)
    monkeypatch.setattr(type(tail.cut.model), "forward", None)
    direct = results(lambda given, places: tail.logits((given,), places), states, positions)
    for found in (first, direct):
        assert all(map(torch.equal, found, walked))


def test_a_cap_on_logits_is_no_module_and_stays() -> None:
    tail, states = tail_of("gemma2", final_logit_softcapping=0.1), 9 * torch.randn(2, TOKENS, 16)
    for _ in range(3):
        logits = tail.logits((states,), slice(1, 4))
        assert logits.shape == (2, 3, 50)
        assert 0.05 < logits.abs().max() <= 0.1
    assert list(tail._chains.values()) == [None]


def chained(code: Callable[[nn.Module, nn.Module, Tensor], Tensor], positions: slice | None = None) -> bool:
    one, two, states = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(2, 5, 3)
    with torch.no_grad(), recorded((one, two)) as calls:
        version = states._version
        return chain_of(calls, states, version, positions, code(one, two, states)) is not None


@pytest.mark.parametrize(
    ("code", "is_chain"),
    [
        (lambda one, two, states: two(one(states)), True),
        (lambda one, two, states: two(one(states).view(2, 5, 3)).contiguous(), True),
        (lambda one, two, states: two(one(states)).mul_(2), False),
        (lambda one, two, states: two(one(states).add_(1)), False),
        (lambda one, two, states: two(one(states) * 1), False),
        (lambda one, two, states: two(one(states.add_(1))), False),
        (lambda one, two, states: two(states) + one(states), False),
        (lambda one, two, states: two(one(states)[:, :2]), False),
        (lambda one, two, states: torch.stack([one(states), two(states)])[1], False),
        (lambda one, two, states: states, False),
    ],
)
def test_what_happens_between_modules_breaks_the_chain(code: Any, is_chain: bool) -> None:
    assert chained(code) == is_chain


def test_positions_are_selected_once_or_there_is_no_chain() -> None:
    places = slice(1, 3)
    assert chained(lambda one, two, states: two(one(states)[:, places]), places)
    assert chained(lambda one, two, states: two(one(states[:, places])), places)
    assert not chained(lambda one, two, states: two(one(states)), places)
