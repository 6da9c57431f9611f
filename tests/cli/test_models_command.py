"""thinpipe models: lists what was verified, verifies what it is asked to, and fails if a type would differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinpipe.cli import models
from thinpipe.cli.app import app
from thinpipe.lab.records.record import Record
from thinpipe.train.models.verify import KINDS, Verified, types_of

RECORD = Record.read(models.RECORD)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", *words])
    return result.exit_code, result.output


def verified_as(outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(wanted: Sequence[tuple[str, str]]) -> Iterator[Verified]:
        for kind, name in reversed(wanted):
            result = "exact" if name == "llama" else outcome
            yield Verified(kind=kind, type=name, model="A", outcome=result, reason="because", blocks=4, seconds=1.0)

    monkeypatch.setattr(models, "verify", found)


def test_the_list_has_every_type_of_a_kind() -> None:
    code, text = run("--kind", "image")
    assert code == 0
    assert all(f" {name} " in text for name in types_of("image"))
    assert "causal" not in text


def test_verifying_shows_inexact_types_and_records_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified_as("refused", monkeypatch)
    file, page = tmp_path / "record.json", tmp_path / "page.md"
    words = ("--verify", "--kind", "causal", "--type", "llama", "--type", "gpt2")
    code, text = run(*words, "--json", str(file), "--markdown", str(page))
    assert code == 0
    below = text.split("Not exact")[1]
    assert "gpt2" in below
    assert "because" in below
    assert "llama" not in below
    record = Record.read(file)
    assert [(row["type"], row["outcome"]) for row in record.rows] == [("gpt2", "refused"), ("llama", "exact")]
    assert "| causal | gpt2 |" in page.read_text()
    assert "| causal | llama |" in page.read_text().split("### Exact")[1]


def test_a_type_that_differs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    verified_as("different", monkeypatch)
    assert run("--verify", "--kind", "causal", "--type", "gpt2")[0] == 1
    assert run("--verify", "--kind", "causal", "--type", "llama")[0] == 0


def test_an_unknown_type_is_named() -> None:
    code, text = run("--verify", "--type", "lama")
    assert code == 2
    assert "got lama" in text


def test_the_record_of_the_release_has_no_type_that_differs() -> None:
    rows = RECORD.rows
    assert {row["kind"] for row in rows} == set(KINDS)
    assert not [row["type"] for row in rows if row["outcome"] == "different"]
    assert all(row["reason"] for row in rows if row["outcome"] != "exact")
    assert sum(row["kind"] == "causal" and row["outcome"] == "exact" for row in rows) >= 165
