"""Activations of frozen layers are sent once: which bytes travel in which epoch, and that nothing else changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from tests.pool import Pool
from tests.train.tasks.written import write_language_model
from tests.train.toy import Recorder, settings_for, world_in
from thinpipe.train import worker
from thinpipe.train.checkpoints.folder import newest
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.tasks import task

WORDS = [
    "the",
    "client",
    "keeps",
    "the",
    "first",
    "layers",
    "and",
    "the",
    "servers",
    "hold",
    "those",
    "between",
    "them",
]
LM, STEPS = task("lm"), 4  # of an epoch
GIVEN: dict[str, Any] = {
    **{"tokens": 64, "samples": 24, "batch_size": 6, "chunks": 3, "epochs": 3, "lora": 4, "lr": 0.01},
    **{"compress": "none", "client_layers": (1, 1), "packing": False},
}
OFF = RunOptions(activation_cache_limit=0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    write_language_model(folder / "model", " ".join(WORDS) * 40, tied=False)
    config = GPT2Config(n_embd=32, n_layer=3, n_head=2, n_positions=64, vocab_size=128, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    for file in (folder / "model").glob("tokenizer*"):
        shutil.copy(file, folder / "gpt2")
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
        (3, {"freeze": ("*.layers.0.*",), "client_layers": (2, 1), "schedule": "1f1b"}),
    ],
    ids=["none", "4bit", "linear", "three"],
)
def test_the_first_epoch_only(pool: Pool, home: Path, workers: int, given: dict[str, Any]) -> None:
    kept, sent = (pool.run(trained, workers, home, running, given)[0] for running in (RunOptions(), OFF))
    assert any("are sent once: worker 1 keeps" in line for line in kept.notices), kept.notices
    assert losses(kept) == pytest.approx(losses(sent), abs=1e-6)
    assert forward_bytes(kept)[0, 1] * 3 == forward_bytes(sent)[0, 1] > 0
    assert {link for link, size in forward_bytes(kept).items() if size != forward_bytes(sent)[link]} == {(0, 1)}


def test_samples_that_the_first_epoch_left_out(pool: Pool, home: Path) -> None:
    """Two of 26 samples fill no batch: chunks with them travel in a later epoch."""
    given = {"samples": 26, "compress": "4bit"}
    kept, sent = (pool.run(trained, 2, home, running, given)[0] for running in (RunOptions(), OFF))
    assert losses(kept) == pytest.approx(losses(sent), abs=1e-6)
    once, all_epochs = forward_bytes(kept)[0, 1], forward_bytes(sent)[0, 1]
    assert all_epochs < 3 * once < 2 * all_epochs


def test_a_resumed_run_sends_again_and_ends_the_same(pool: Pool, home: Path, tmp_path: Path) -> None:
    given = {"compress": "4bit"}
    straight = pool.run(trained, 2, home, RunOptions(activation_cache=tmp_path / "cache"), given)[0]
    assert f"in {tmp_path / 'cache'}" in straight.notices[-1]
    assert list((tmp_path / "cache").iterdir()) == []  # no file is left behind
    pool.run(trained, 2, home, RunOptions(save=tmp_path / "run", steps=STEPS + 1), given)
    rest = RunOptions(save=tmp_path / "run", resume=newest(tmp_path / "run"))
    resumed = pool.run(trained, 2, home, rest, given)[0]
    assert resumed.end.parameters_sha256 == straight.end.parameters_sha256
    again = forward_bytes(resumed)[0, 1] / forward_bytes(straight)[0, 1]
    assert 1 <= again < 7 / 4  # of seven steps, those of one epoch and more: shuffled chunks mix old and new samples


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"model": "gpt2"}, "they have dropout"),
        ({"tokens": 16, "compress": "8bit", "chunks": 1}, "too small for tile:8"),
        ({"epochs": 1}, None),
        ({"client_layers": (2, 1)}, None),  # with adapters in the client's first layer
    ],
)
def test_what_changes_is_sent_in_every_epoch(pool: Pool, home: Path, given: dict[str, Any], reason: str | None) -> None:
    given = {"epochs": 2, **given, "model": str(home / given.get("model", "model"))}
    found = pool.run(trained, 2, home, RunOptions(), given)[0]
    notices = [line for line in found.notices if "frozen layers" in line]
    assert len(notices) == (reason is not None)
    assert all("are sent in every epoch" in line and line.endswith(str(reason)) for line in notices)
    first = next(link for link in found.plan.links if (link.source, link.target) == (0, 1))
    assert forward_bytes(found)[0, 1] == pytest.approx(first.wire_bytes * len(found.steps), rel=0.01)
