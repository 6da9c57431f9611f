"""Packed texts through a pipeline of three workers: losses and gradients of padding, and what the links carry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.train.toy import world_in
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.replica import ReplicaEngine
from thinpipe.train.engines.units import cut_model, meta_of
from thinpipe.train.models.packed import INPUTS, first_fit
from thinpipe.train.models.tiny import shrunken
from thinpipe.train.tasks.chat import Encoded, Examples
from thinpipe.train.tasks.task import Batch

LENGTH, CHUNKS, WINDOW = 24, 2, 4
LENGTHS = (24, 5, 9, 10, 3, 20, 7, 6, 8)  # four packed samples, of one to four texts; longer than the window
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "gpt2": {},
}


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[Encoded]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in lengths:
        ids = torch.randint(10, 100, (length,), generator=generator, dtype=torch.int32)
        made.append(Encoded(ids, torch.rand(length, generator=generator) < 0.7, length, False))
    return made


def build(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = shrunken(AutoConfig.for_model(kind, **KINDS[kind]))
    return AutoModelForCausalLM.from_config(config).eval()  # no dropout


def batch_of(packed: bool) -> Batch:
    made = (Examples.packed_of if packed else Examples.padded_of)(texts(), LENGTH, 0, True)
    rows = list(range(len(made)))
    if len(rows) % CHUNKS:  # the same text twice in a padded batch would count twice: one without labels fills it
        made = Examples(
            [*made.samples, [Encoded(torch.ones(2, dtype=torch.int32), torch.zeros(2) > 0, 0, False)]], LENGTH, 0, True
        )
        rows.append(len(rows))
    return made.batch(torch.tensor(rows))


def learnt(group: Any, kind: str, packed: bool) -> tuple[float, dict[str, Tensor], int]:
    """Loss and gradients of this worker, and the bytes it sent."""
    batch, world = batch_of(packed), world_in(group)
    chunk = meta_of([each[: len(each) // CHUNKS] for each in batch.inputs])
    units = cut_model(build(kind), chunk, **({"names": INPUTS} if packed else {}))
    if group is None:
        engine: Any = ReplicaEngine(units, world, chunks=CHUNKS)
    else:
        cutting = Cutting(layout="client-server", order="gpipe", chunks=CHUNKS, client_layers=(1, 1))
        engine = PipelineEngine(units, chunk, cutting, Links(forward="none", backward="none"), world)
    engine.set_training(False)
    loss, _ = engine.compute(batch if engine.reads_inputs else None)
    tensors = {name: each for stage in engine.stages.values() for name, each in stage.parameters().items()}
    return loss, {name: each.grad for name, each in tensors.items() if each.grad is not None}, engine.sent_bytes()


def learnt_all(group: Any) -> list[Any]:
    return [learnt(group, kind, True) for kind in KINDS]


@pytest.mark.timeout(300)
def test_packed_texts_through_a_pipeline_have_losses_and_gradients_of_padded_ones(pool: Pool) -> None:
    together = pool.run(learnt_all, 3, limit_s=280)
    for number, kind in enumerate(KINDS):
        loss, gradients, _ = learnt(None, kind, False)
        parts = [worker[number] for worker in together]
        assert parts[0][0] == pytest.approx(loss, abs=1e-5), kind
        found = {name: each for part in parts for name, each in part[1].items()}
        assert found.keys() == gradients.keys()
        for name, each in found.items():
            torch.testing.assert_close(each, gradients[name], atol=1e-5, rtol=1e-5, msg=f"{kind}: {name}")


def test_without_positions_packed_texts_would_differ() -> None:
    """The exactness above is that of positions that restart, not of a tolerance."""
    packed = batch_of(True)
    units = cut_model(build("llama"), meta_of(packed.inputs), names=INPUTS)
    outputs = []
    for position_ids in (packed.inputs[1], torch.arange(LENGTH).expand(len(packed.labels), LENGTH)):
        values: tuple[Tensor, ...] = (packed.inputs[0], position_ids.contiguous())
        for unit in units.units:
            values = unit(*values)
        outputs.append(values[0])
    assert float((outputs[0] - outputs[1]).detach().abs().max()) > 0.01


def test_rows_are_filled_and_hold_every_text_once() -> None:
    lengths = [int(each) for each in torch.randint(1, 256, (3000,), generator=torch.Generator().manual_seed(3))]
    rows = first_fit(lengths, 256)
    assert sorted(number for row in rows for number in row) == list(range(3000))
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert max(filled) <= 256
    assert len(rows) <= 1.02 * sum(lengths) / 256 + 1
    assert [min(row) for row in rows] == sorted(min(row) for row in rows)
    assert first_fit([5, 5], 5) == [[0], [1]]
    assert first_fit([1, 2, 3], 9) == [[0, 1, 2]]
