"""Activations of frozen layers are sent once: which bytes travel in which epoch, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from tests.pool import Pool
from tests.train.tasks.written import write_language_model
from tests.train.toy import Recorder, settings_for, world_in
from thinpipe.train import worker
from thinpipe.train.checkpoints.folder import newest
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.tasks import task

WORDS = "the client keeps the first layers and the servers hold those between them ".split()
LM, STEPS = task("lm"), 4  # of an epoch
GIVEN: dict[str, Any] = {
    **{"tokens": 64, "samples": 24, "batch_size": 6, "chunks": 3, "epochs": 3, "lora": 4, "lr": 0.01},
    **{"compress": "none", "client_layers": (1, 1), "packing": False},
}
OFF = RunOptions(activation_cache_limit=0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    write_language_model(folder / "model", " ".join(WORDS) * 40)
    (folder / "text.txt").write_text(" ".join(WORDS[index * index % 13] for index in range(9000)))
    return folder


def trained(group: Any, home: Path, running: RunOptions, given: dict[str, Any]) -> Recorder:
    ears, there = Recorder(), {"model": str(home / "model"), "data": home / "text.txt"}
    settings = settings_for(LM, group, **{**there, **GIVEN, **given})
    worker.train(LM, settings, running, world_in(group), lambda: ears)
    return ears


def forward_bytes(found: Recorder) -> dict[tuple[int, int], int]:
    return {(link.source, link.target): link.wire_bytes for link in found.end.links if link.direction == "forward"}


def losses(found: Recorder) -> list[float]:
    return [*(step.loss for step in found.steps), *(epoch.validation_loss for epoch in found.epochs)]


@pytest.mark.parametrize(
    ("workers", "given"),
    [
        (2, {}),
        (2, {"compress": "4bit", "accumulate": 2, "chunks": 1}),
        (2, {"layout": "linear", "client_layers": None, "compress": "8bit", "freeze": ("*.layers.[01].*",)}),
        (3, {"freeze": ("*.layers.[0].*",), "client_layers": (2, 1), "schedule": "1f1b"}),
    ],
    ids=["none", "4bit", "linear", "three"],
)
def test_the_first_epoch_only(pool: Pool, home: Path, workers: int, given: dict[str, Any]) -> None:
    kept, sent = (pool.run(trained, workers, home, running, given)[0] for running in (RunOptions(), OFF))
    assert any("are sent once: worker 1 keeps" in line for line in kept.notices), kept.notices
    assert losses(kept) == pytest.approx(losses(sent), abs=1e-6)
    assert forward_bytes(kept)[0, 1] * 3 == forward_bytes(sent)[0, 1] > 0
    assert {link for link, size in forward_bytes(kept).items() if size != forward_bytes(sent)[link]} == {(0, 1)}
