"""Classifiers of transformers, cut into stages of three workers, learn what they do in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.train.toy import world_in
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.replica import ReplicaEngine
from thinpipe.train.engines.step import train_step
from thinpipe.train.engines.units import Units, cut_model, meta_of
from thinpipe.train.models.tiny import shrunken
from thinpipe.train.models.weights import params_on_meta, random_weights
from thinpipe.train.tasks.task import Batch

CLASSES, CHUNK, CHUNKS, STEPS = 3, 2, 3, 3
LR = {"sequence": 0.02, "image": 0.001}
# Batch norms of few values make much of a rounding: so only two stages of a ResNet, and small steps.
FACTS = {"resnet": {"depths": [2, 2], "hidden_sizes": [64, 128]}}
# Kind, model type, and how the pipeline runs it; ``known``: cut as ``thinpipe.train.models.sequential`` does.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("sequence", "bert", {"types": True}),
    ("sequence", "roberta", {}),
    ("sequence", "roberta", {"known": True, "layout": "linear"}),
    # Looks for the last token that is no padding.
    ("sequence", "gpt2", {"order": "1f1b", "recompute": True, "client_layers": (1, 2)}),
    ("sequence", "gpt2", {"layout": "linear"}),
    ("image", "vit", {}),
    ("image", "convnext", {"client_layers": (2, 2)}),
    ("image", "resnet", {"order": "1f1b"}),  # running statistics
]


def batch_of(kind: str, seed: int, *, types: bool) -> Batch:
    """Images; or texts of which every other one is padded on the left, the others on the right."""
    drawn, size = torch.Generator().manual_seed(seed), CHUNK * CHUNKS
    labels = torch.randint(0, CLASSES, (size,), generator=drawn)
    if kind == "image":
        images = torch.randn(size, 3, 64, 64, generator=drawn)
        return Batch(inputs=(images + labels[:, None, None, None],), labels=labels)
    tokens = torch.randint(10, 100, (size, 12), generator=drawn) + labels[:, None]
    mask = torch.ones_like(tokens)
    for row in range(size):
        padded = int(torch.randint(1, 9, (1,), generator=drawn))
        mask[row, slice(0, padded) if row % 2 else slice(12 - padded, 12)] = 0
    tokens[mask == 0] = 0
    second = (torch.arange(12) > 5).long().expand(size, 12)
    return Batch(inputs=(tokens, mask, second) if types else (tokens, mask), labels=labels)


def cut(kind: str, name: str, batch: Batch, *, known: bool) -> Units:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrunken(CONFIG_MAPPING[name](**FACTS.get(name, {})))
    config.num_labels, config.pad_token_id = CLASSES, 0
    builder = "AutoModelForImageClassification" if kind == "image" else "AutoModelForSequenceClassification"
    with params_on_meta():
        model = getattr(transformers, builder).from_config(config)

    def load(model: nn.Module, names: Any) -> None:
        random_weights(model, names, seed=5)

    if known:
        load(model, model.state_dict())
        return cut_model(model, ())
    return cut_model(model, meta_of([tensor[:CHUNK] for tensor in batch.inputs]), load)


def learnt(engine: Engine, kind: str, *, types: bool) -> tuple[list[float], dict[str, Tensor], Tensor | None]:
    """Losses, everything that is saved of this worker's stages, and the logits of a batch that was not trained on."""
    optimizer = torch.optim.SGD(engine.parameters(), lr=LR[kind], momentum=0.9)
    losses = []
    for step in range(STEPS):
        batch = batch_of(kind, step, types=types) if engine.reads_inputs or engine.reads_labels else None
        losses.append(train_step(engine, optimizer, batch, step=step).loss)
    engine.set_training(False)
    logits = engine.predict(batch_of(kind, STEPS, types=types).inputs if engine.reads_inputs else None)
    tensors = {
        name: tensor.detach().clone() for stage in engine.stages.values() for name, tensor in stage.tensors().items()
    }
    return losses, tensors, logits


def run_case(group: Any, kind: str, name: str, given: dict[str, Any]) -> Any:
    """On one of the workers; without a group, in one process."""
    types, known = given.get("types", False), given.get("known", False)
    batch = batch_of(kind, 0, types=types)
    world = world_in(group)
    if group is None:
        engine: Engine = ReplicaEngine(cut(kind, name, batch, known=False), world, chunks=CHUNKS)
        return learnt(engine, kind, types=types)
    cutting = Cutting(
        layout=given.get("layout", "client-server"),
        order=given.get("order", "gpipe"),
        chunks=CHUNKS,
        client_layers=given.get("client_layers"),
    )
    engine = PipelineEngine(
        cut(kind, name, batch, known=known),
        meta_of([tensor[:CHUNK] for tensor in batch.inputs]),
        cutting,
        Links(forward="none", backward="none"),
        world,
        recompute=given.get("recompute", False),
    )
    if not known:  # of what is elsewhere there are no weights here
        mine = {id(each) for each in engine.parameters()}
        assert all(each.is_meta for each in engine.partition.model.model.parameters() if id(each) not in mine)
    sent = [meta for metas in engine.partition.between[1:-1] for meta in metas]
    assert sum(not meta.dtype.is_floating_point for meta in sent) == (0 if kind == "image" else len(sent) // 2)
    return learnt(engine, kind, types=types)


def run_cases(group: Any, cases: list[Any]) -> list[Any]:
    return [run_case(group, *case) for case in cases]


@pytest.mark.timeout(300)
def test_three_workers_train_like_one_process(pool: Pool) -> None:
    """Losses, weights, running statistics, predictions; nothing but the mask is sent alongside states."""
    together = pool.run(run_cases, 3, CASES, limit_s=280)
    alone: dict[str, Any] = {}
    for number, (kind, name, given) in enumerate(CASES):
        if name not in alone:
            alone[name] = run_case(None, kind, name, given)
        losses, tensors, logits = alone[name]
        parts = [worker[number] for worker in together]
        has_end = 2 if given.get("layout") == "linear" else 0
        assert parts[has_end][0] == pytest.approx(losses, abs=1e-5), name
        assert losses[-1] != pytest.approx(losses[0], abs=1e-3), name
        found = {key: tensor for part in parts for key, tensor in part[1].items()}
        assert found.keys() == tensors.keys(), name
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, tensors[key], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(parts[has_end][2], logits, atol=1e-5, rtol=1e-5)
