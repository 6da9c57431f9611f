"""Adapters over three workers learn what peft's do in one process, and come home in peft's format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.train.engines.test_language_models import CHUNKS, SAMPLES, batches, learn_complete, optimizer_of
from tests.train.engines.test_language_models import build as build_plain
from tests.train.toy import world_in
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.step import train_step
from thinpipe.train.engines.units import cut_model, meta_of
from thinpipe.train.models.adapters import Adapted, Lora, adapt

KINDS = ("llama", "gpt2", "qwen2")  # the last with tied embeddings
LORA, SEED = Lora(rank=4, alpha=16), 3


def adapted(kind: str) -> Adapted:
    return adapt(build_plain(kind), LORA, (), SEED)


def learn_cut(
    group: dist.ProcessGroup, kind: str, layout: Any, order: Any, recompute: bool, layers: Any = None
) -> dict[str, Any]:
    world, made = world_in(group), batches(padded=True)
    chunk = meta_of([each[: SAMPLES // CHUNKS] for each in made[0].inputs])
    cutting = Cutting(layout=layout, order=order, chunks=CHUNKS, client_layers=layers)
    links = Links(forward="none", backward="none")
    engine = PipelineEngine(cut_model(adapted(kind).model, chunk), chunk, cutting, links, world, recompute=recompute)
    optimizer = optimizer_of([{"params": [each for each in engine.parameters() if each.requires_grad]}])
    losses = []
    for step, batch in enumerate(made):
        mine = batch if engine.reads_inputs or engine.reads_labels else None
        losses.append(train_step(engine, optimizer, mine, step=step + 1, clip_norm=1.0).loss)
    parameters = {name: each for stage in engine.stages.values() for name, each in stage.parameters().items()}
    return {
        "losses": losses,
        "trained": {name: each.detach() for name, each in parameters.items() if each.requires_grad},
        "frozen": {name: each.detach() for name, each in parameters.items() if not each.requires_grad},
        "state": len(optimizer.state),
        "links": {(each.source, each.target): each.wire_bytes for each in engine.collect_links()[0]},
        "planned": [(each.source, each.target) for each in engine.link_plans()],
        "holdings": engine.holdings,
    }


def learn_by_peft(kind: str) -> tuple[Any, list[float]]:
    """The same by peft's own model, in one process; its adapters begin as ours do."""
    from peft import LoraConfig, get_peft_model

    ours = adapted(kind)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=ours.config.target_modules, fan_in_fan_out=kind == "gpt2")
    model = get_peft_model(build_plain(kind), config)
    model.base_model.model.load_state_dict(ours.model.state_dict())
    return model, learn_complete(model, padded=True)


@pytest.mark.parametrize(
    ("kind", "layout", "order", "recompute"),
    [
        ("llama", "client-server", "gpipe", False),
        ("llama", "linear", "1f1b", True),
        ("gpt2", "client-server", "1f1b", False),
        ("qwen2", "client-server", "1f1b", True),
    ],
)
def test_three_workers_train_like_peft(pool: Pool, kind: str, layout: str, order: str, recompute: bool) -> None:
    results = pool.run(learn_cut, 3, kind, layout, order, recompute)
    model, losses = learn_by_peft(kind)
    full = dict(model.base_model.model.named_parameters())
    found = {name: each for result in results for name, each in result["trained"].items()}
    assert found.keys() == {name for name, each in full.items() if each.requires_grad}
    for name, each in found.items():
        torch.testing.assert_close(each, full[name].detach(), atol=1e-5, rtol=1e-5)
    for result in results:
        for name, each in result["frozen"].items():
            assert torch.equal(each, full[name])
    assert results[0]["losses"] == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.05


def test_a_frozen_client_receives_no_gradients(pool: Pool) -> None:
    """Its embeddings have no adapters: of four transfers one does not take place. Its optimizer has no state."""
    results = pool.run(learn_cut, 3, "llama", "client-server", "gpipe", False, (1, 1))
    links = results[0]["links"]
    assert (1, 0) not in links
    assert links.keys() == {(0, 1), (1, 2), (2, 3), (2, 1), (3, 2)} == set(results[0]["planned"])
    assert links[1, 2] > links[2, 1] > 0  # the former with a mask
    assert results[0]["state"] == 0
    assert [each.trained for each in results[0]["holdings"]][::3] == [0, 0]
    assert all(result["state"] == len(result["trained"]) > 0 for result in results[1:])
