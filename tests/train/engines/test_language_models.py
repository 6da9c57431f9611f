"""Language models of transformers learn, cut over three workers, what they learn in one piece, by their own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import Pool
from tests.train.toy import world_in
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.step import train_step
from thinpipe.train.engines.units import meta_of
from thinpipe.train.models.tiny import shrunken
from thinpipe.train.tasks.task import IGNORED, Batch

STEPS, SAMPLES, CHUNKS, TOKENS, WINDOW = 6, 4, 2, 12, 4
# Type -> what its default configuration lacks.
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {},
    "gemma2": {},
    "gpt2": {},
    "opt": {},
    "bloom": {},
    "mixtral": {"sliding_window": WINDOW},
}


def build(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shrunken(AutoConfig.for_model(kind, **SPECIAL[kind])))


def batches(padded: bool) -> list[Batch]:
    """Each with a text padded left, one padded right and two unpadded ones; or unpadded ones only, without a mask."""
    torch.manual_seed(1)
    texts = torch.randint(10, 100, (2, SAMPLES, TOKENS + 1))  # seen again and again: there is something to learn
    made = []
    for step in range(STEPS):
        tokens, labels = texts[step % 2, :, :-1], texts[step % 2, :, 1:]
        mask = torch.ones_like(tokens)
        mask[0, :5] = mask[1, -4:] = 0
        if padded:
            made.append(Batch(inputs=(tokens, mask), labels=labels.where(mask == 1, IGNORED)))
        else:
            made.append(Batch(inputs=(tokens,), labels=labels))
    return made


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """No AdamW: the bias of keys has no gradient but rounding, which Adam makes as large as any other."""
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def learn_cut(group: dist.ProcessGroup, kind: str, padded: bool, layout: Any) -> tuple[dict[str, Tensor], list[float]]:
    world, made = world_in(group), batches(padded)
    cutting = Cutting(layout=layout, order="1f1b", chunks=CHUNKS)
    chunk = meta_of([each[: SAMPLES // CHUNKS] for each in made[0].inputs])
    engine = PipelineEngine(build(kind), chunk, cutting, Links(forward="none", backward="none"), world)
    optimizer = optimizer_of(engine.parameters())
    losses = []
    for step, batch in enumerate(made):
        mine = batch if engine.reads_inputs or engine.reads_labels else None
        losses.append(train_step(engine, optimizer, mine, step=step + 1, clip_norm=1.0).loss)
    tensors = {name: each.detach() for stage in engine.stages.values() for name, each in stage.parameters().items()}
    return tensors, losses


def learn_complete(model: nn.Module, padded: bool) -> list[float]:
    """Losses of a model that nobody has cut, by torch's own means."""
    losses = []
    optimizer = optimizer_of([each for each in model.parameters() if each.requires_grad])
    for batch in batches(padded):
        inputs = dict(zip(("input_ids", "attention_mask"), batch.inputs, strict=False))
        logits = model(**inputs, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("kind", "padded"),
    [
        *((kind, True) for kind in SPECIAL),
        # Without a mask: rotated positions, windows, both, and a bias that is made of the mask.
        *((kind, False) for kind in ("llama", "qwen2", "gemma2", "bloom")),
    ],
    ids=lambda value: {True: "padded left and right", False: "packed"}.get(value, value),
)
def test_three_workers_train_like_the_complete_model(pool: Pool, kind: str, padded: bool) -> None:
    layout = "linear" if kind == "llama" and padded else "client-server"
    results = pool.run(learn_cut, 3, kind, padded, layout)
    full = build(kind)
    losses, parameters = learn_complete(full, padded), dict(full.named_parameters())
    found = {name: tensor for tensors, _ in results for name, tensor in tensors.items()}
    assert found.keys() == parameters.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, parameters[name].detach(), atol=1e-5, rtol=1e-5)
    assert results[0][1] == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.3
