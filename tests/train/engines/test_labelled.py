"""The logits of unlabelled positions are left out, and loss and gradients are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinpipe.train.engines import loss as module
from thinpipe.train.engines.loss import Loss
from thinpipe.train.models import unit_modules
from thinpipe.train.models.cut import CutModel
from thinpipe.train.models.tiny import shrunken
from thinpipe.train.models.unit_modules import TailUnit
from thinpipe.train.tasks.task import IGNORED

ROWS, TOKENS, CHUNKS = 4, 12, 2


def computed(
    labels: Tensor, monkeypatch: pytest.MonkeyPatch, kind: str, *, sparse: bool, piece: int
) -> tuple[float, float, list[Tensor], int]:
    """Return loss, correct samples and gradients of a step, and the number of positions with logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setattr(module, "_SPARSE", 1.0 if sparse else 0.0)
    monkeypatch.setattr(unit_modules, "_WIDTHS", 1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shrunken(AutoConfig.for_model(kind)))
    tokens, mask = torch.randint(3, 60, (ROWS // CHUNKS, TOKENS)), torch.ones(ROWS // CHUNKS, TOKENS, dtype=torch.long)
    tail = TailUnit(CutModel(model, {"input_ids": tokens, "attention_mask": mask}))
    positions = 0

    def count(_: object, inputs: tuple[Tensor]) -> None:
        nonlocal positions
        positions += inputs[0].shape[0] * inputs[0].shape[1]

    model.lm_head.register_forward_pre_hook(count)
    loss = Loss(tail, device=torch.device("cpu"), piece=piece)
    loss.begin(labels, CHUNKS)
    states = torch.randn(ROWS, TOKENS, model.config.hidden_size, requires_grad=True)
    total = torch.stack(
        [loss((part, mask), each) for part, each in zip(states.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)]
    ).mean()
    total.backward()
    weights = model.lm_head.weight.grad
    assert states.grad is not None
    return total.item(), loss.correct(), [states.grad, weights], positions


@pytest.mark.parametrize("piece", [1 << 26, 300])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_few_labels(monkeypatch: pytest.MonkeyPatch, kind: str, piece: int) -> None:
    """The second chunk has none. GPT-2 reshapes the states of the last block by the shape of its inputs."""
    labels = torch.full((ROWS, TOKENS), IGNORED)
    labels[0, 3:7], labels[1, 10:] = torch.arange(20, 24), torch.arange(30, 32)
    every = computed(labels, monkeypatch, kind, sparse=False, piece=piece)
    few = computed(labels, monkeypatch, kind, sparse=True, piece=piece)
    assert few[0] == pytest.approx(every[0], rel=1e-6)
    assert few[1] == every[1]
    for one, other in zip(few[2], every[2], strict=True):
        torch.testing.assert_close(one, other)
    assert every[3] >= ROWS * TOKENS
    assert few[3] < every[3] / 3
