"""Servers without files do what servers with files do, and receive the layers that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.train.serve.runs import Offer, evaluate_with, generate_with, layer_bytes, train_with
from tests.train.tasks.written import write_language_model

TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60
FILES = Offer(caches=None)


@pytest.fixture(params=["one file, tied", "shards"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "home"
    write_language_model(folder / "model", TEXT, tied=request.param != "shards")
    if request.param == "shards":
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        (folder / "model" / "model.safetensors").unlink()
        model.save_pretrained(folder / "model", max_shard_size="40KB")
        assert len(list((folder / "model").glob("model-*.safetensors"))) > 2
    (folder / "text.txt").write_text(TEXT)
    return folder


def given_of(home: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(home / "model"), "data": str(home / "text.txt"), **more}


def test_training(pool: Pool, home: Path, tmp_path: Path) -> None:
    with_files = pool.run(train_with, 3, FILES, given_of(home))
    client, *servers = pool.run(train_with, 3, Offer(caches=tmp_path / "caches"), given_of(home))
    assert client.result == with_files[0].result
    expected = [layer_bytes(home / "model", layers) for layers in ((0,), (1, 2))]
    found = [seen.received["model"] for seen in servers]
    assert sorted(found) == sorted(expected) or found == [
        layer_bytes(home / "model", layers) for layers in ((0, 1), (2,))
    ]
    assert client.sent == found
