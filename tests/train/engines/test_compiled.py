"""Compiled runs of blocks compute the same, from one graph; models without such blocks are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinpipe.options import OptionError
from thinpipe.pipeline.partition import StageModule
from thinpipe.train.engines import compiled
from thinpipe.train.engines.compiled import CompiledRun, compile_blocks
from thinpipe.train.models.cut import CutModel
from thinpipe.train.models.unit_modules import cut_into_units


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are compiled, by a backend that runs them as they are."""
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(compiled, "LONGEST", 2)
    return made


def stage_of(kind: str, inputs: dict[str, Tensor]) -> StageModule:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "head_dim": 4, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads))
    return StageModule(cut_into_units(CutModel(model, inputs)))


def results(stage: nn.Module, given: tuple[Tensor, ...]) -> list[Tensor]:
    logits = stage(*given)
    return [logits.detach(), *torch.autograd.grad(logits.square().sum(), list(stage.parameters()))]


@pytest.mark.parametrize("padded", [False, True])
def test_runs_of_blocks_share_one_graph_and_compute_the_same(padded: bool, graphs: list[Any]) -> None:
    tokens = torch.randint(50, (3, 6))
    masks = [torch.ones_like(tokens) for _ in range(2)]
    masks[0][0, 4:] = masks[1][1, 2:] = 0
    example = {"input_ids": tokens} | ({"attention_mask": masks[0]} if padded else {})
    stage = stage_of("llama", example)
    batches = [(tokens, mask) for mask in masks] if padded else [(tokens,), (tokens.flip(0),)]
    expected = [results(stage, batch) for batch in batches]
    compile_blocks([stage])
    assert [len(call._units) for call in stage.calls if isinstance(call, CompiledRun)] == [2, 2]
    with torch.no_grad():
        stage(*batches[0])
    assert graphs == []  # an evaluation runs the blocks themselves
    for batch, known in zip(batches, expected, strict=True):
        assert all(map(torch.equal, results(stage, batch), known))
    assert len(graphs) == 1


def test_a_model_without_such_blocks_is_refused() -> None:
    with pytest.raises(OptionError, match="pass hidden states only"):
        compile_blocks([StageModule([nn.Linear(2, 2), nn.Linear(2, 2)])])
