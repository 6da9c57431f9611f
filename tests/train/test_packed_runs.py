"""Runs over packed conversations: the same evaluation as padded ones, and the same samples again on resume."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.train.tasks.written import write_language_model
from tests.train.toy import Recorder, settings_for, world_in
from thinpipe.train import worker
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.tasks import task

WORDS = ["the", "client", "keeps", "the", "first", "and", "the", "last", "layers"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, drawn = tmp_path_factory.mktemp("packed"), random.Random(0)
    write_language_model(folder / "model", " ".join(WORDS) * 40)
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(200):
            answer = " ".join(drawn.choices(WORDS, k=12 if number == 0 else drawn.randint(1, 3)))
            file.write(json.dumps({"prompt": drawn.choice(WORDS), "completion": f" {answer}"}) + "\n")
    return folder


def trained(group: Any, home: Path, running: RunOptions, given: dict[str, Any]) -> Recorder:
    ears, chat = Recorder(), task("chat")
    there = {"model": str(home / "model"), "data": home / "chats.jsonl", "batch_size": 6, "chunks": 3, "epochs": 2}
    settings = settings_for(chat, group, **{**there, "compress": "none", **given})
    worker.train(chat, settings, running, world_in(group), lambda: ears)
    return ears


def test_an_evaluation_of_packed_conversations_is_that_of_padded_ones(pool: Pool, home: Path) -> None:
    packed, padded = (
        pool.run(trained, 3, home, RunOptions(steps=1), {"packing": packing, "lr": 1e-9})[0]
        for packing in (True, False)
    )
    assert packed.plan.validation_samples < padded.plan.validation_samples
    assert packed.plan.train_samples < padded.plan.train_samples / 2
    assert packed.end.validation_loss == pytest.approx(padded.end.validation_loss, abs=1e-5)
    assert packed.end.metric == pytest.approx(padded.end.metric, rel=1e-5)
    assert packed.end.bits_per_byte == pytest.approx(padded.end.bits_per_byte, rel=1e-5)


def test_a_resumed_run_packs_the_same_samples(pool: Pool, home: Path, tmp_path: Path) -> None:
    given = {"packing": True, "lr": 1e-3, "lora": 4}
    straight = pool.run(trained, 2, home, RunOptions(), given)[0]
    pool.run(trained, 2, home, RunOptions(save=tmp_path, steps=3), given)
    rest = pool.run(trained, 2, home, RunOptions(save=tmp_path, resume=tmp_path), given)[0]
    assert len(rest.steps) == len(straight.steps) - 3 > 0
    assert rest.end.parameters_sha256 == straight.end.parameters_sha256
