"""Benchmarks join workers that were started by hand, with the options of thinpipe train; here both on loopback."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.test_many_machines import LIMIT_S, free_port, run_together
from thinpipe.cli.app import app
from thinpipe.lab.records.record import Record

MLP = ["--model", "mlp", "--hidden", "16", "--layers", "2", "--batch-size", "8"]
BENCHMARKS = {
    "link": ["--sizes", "1kB", "--repeat", "2", "--probe", "0"],
    "pipeline": [*MLP, "--chunks", "2", "--steps", "1", "--skip-steps", "1", "--threads", "1", "--compress", "none"],
    "ddp": ["--model", "own:tiny", "--steps", "2", "--skip-steps", "1"],
}


OWN = """
from torch import nn, ones

def tiny(batch):
    return nn.Linear(4, 4), (ones(batch, 4),), lambda output: output.sum()
"""


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.timeout(2 * LIMIT_S)
def test_two_processes_measure_together_and_worker_0_reports(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", f"{os.getcwd()}{os.pathsep}{tmp_path}")
    path, master = tmp_path / "r.json", f"127.0.0.1:{free_port()}"
    common = ["-m", "thinpipe", "bench", name, *BENCHMARKS[name], "--workers", "2", "--master", master]
    (out, _), (other, _) = run_together(
        [[*common, "--rank", "0", "--json", str(path)], [*common, "--rank", "1"]], tmp_path
    )
    rows = Record.read(path).rows
    expected = {
        "link": [("one way", 2), ("both ways", 4)],
        "pipeline": [("data", 2), ("pipeline", 2)],
        "ddp": [("no ddp", 1), ("ddp", 1), ("ddp", 2)],
    }
    names = {"link": ("ways", "messages"), "pipeline": ("parallel", "workers"), "ddp": ("ddp", "replicas")}[name]
    assert [tuple(row[each] for each in names) for row in rows] == expected[name]
    assert out
    assert other == ""


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("link", ["--workers", "3"], "--workers is 2, the ends of the link; got 3"),
        ("link", ["--rank", "0", "--workers", "2"], "--rank N --master HOST:PORT --workers N, on each"),
        ("link", ["--rank", "0", "--master", "127.0.0.1:1"], "--rank N --master HOST:PORT --workers N, on each"),
        ("pipeline", ["--rank", "0", "--master", "127.0.0.1:1"], "--rank N --master HOST:PORT --workers N, on each"),
        ("ddp", ["--rank", "2", "--master", "127.0.0.1:1", "--workers", "2"], "from 0 to 1 with 2 workers; got 2"),
    ],
)
def test_missing_options_are_one_line(name: str, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", name, *options])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line
