"""A language model of transformers, cut into stages, learns what the whole one does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.train.tasks.written import write_language_model
from tests.train.toy import Recorder, run_toy
from thinpipe.train.tasks.tasks import task

TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60


def train(group: Any, folder: Path, given: dict[str, Any]) -> Recorder:
    data = {"model": str(folder / "model"), "data": str(folder / "text.txt"), "tokens": 16, "samples": 32}
    return run_toy(group, task("lm"), **data, batch_size=8, chunks=2, lr=0.01, compress="none", **given)


def losses(recorder: Recorder) -> dict[str, float | None]:
    assert recorder.end is not None
    assert recorder.end.metric == pytest.approx(math.exp(recorder.end.validation_loss))
    return {name: getattr(recorder.end, name) for name in ("train_loss", "validation_loss", "bits_per_byte")}


def test_three_workers_train_like_one_process(pool: Pool, tmp_path: Path) -> None:
    """Its embeddings are the weights of its head, so that client gradients come from both ends."""
    write_language_model(tmp_path / "model", TEXT, tied=True)
    (tmp_path / "text.txt").write_text(TEXT)
    alone = losses(train(None, tmp_path, {"parallel": "none"}))
    together = losses(pool.run(train, 3, tmp_path, {})[0])
    assert together == pytest.approx(alone, abs=1e-5)
    assert alone["validation_loss"] < 4.7  # below what a guess among 120 tokens has, so it has learnt something


def test_the_tokens_of_a_sample_are_those_it_is_computed_with(tmp_path: Path) -> None:
    write_language_model(tmp_path / "model", TEXT)
    (tmp_path / "text.txt").write_text(TEXT)
    chat = [{"prompt": "a client keeps", "completion": " the first" * count} for count in (1, 2, 4)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chat)))
    given = {"model": str(tmp_path / "model"), "parallel": "none", "samples": 2, "batch_size": 2}
    plans = {
        name: run_toy(None, task(name), **given, data=str(tmp_path / file), tokens=tokens).plan
        for name, file, tokens in (("lm", "text.txt", 16), ("chat", "chat.jsonl", 60))
    }
    assert plans["lm"].tokens == 16
    assert 8 < plans["chat"].tokens < 60  # padded to the longest, no further
