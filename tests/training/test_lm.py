"""A language model of transformers, cut into stages, learns what the whole one does."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workloads.written import write_language_model

TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60


def train(folder: Path, *options: str) -> dict[str, float]:
    record = folder / "record.json"
    command = ["train", "--model", str(folder / "model"), "--data", str(folder / "text.txt"), "--json", str(record)]
    small = ["--tokens", "16", "--samples", "32", "--batch-size", "8", "--chunks", "2", "--lr", "0.01"]
    run = subprocess.run(
        [sys.executable, "-m", "thinpipe", *command, *small, "--compress", "none", *options],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (row,) = (row for row in json.loads(record.read_text())["rows"] if row.get("validation_loss") is not None)
    assert row["metric"] == pytest.approx(math.exp(row["validation_loss"]))
    return {name: row[name] for name in ("train_loss", "validation_loss", "bits_per_byte")}


def test_three_workers_learn_what_one_process_does(tmp_path: Path) -> None:
    """Its embeddings are the weights of its head, so that client gradients come from both ends."""
    write_language_model(tmp_path / "model", TEXT, tied=True)
    (tmp_path / "text.txt").write_text(TEXT)
    alone = train(tmp_path, "--parallel", "none")
    together = train(tmp_path, "--workers", "3")
    assert together == pytest.approx(alone, abs=1e-5)
    assert alone["validation_loss"] < 4.7  # below what a guess among 120 tokens has, so it has learnt something
