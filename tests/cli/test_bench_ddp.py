"""thinpipe bench ddp as a program: started or joined, printed by one, kept, ended when a replica dies."""

import os
import re
import subprocess

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.preloaded import Program
from thinpipe.cli.app import app
from thinpipe.lab.bench.ddp.ddp_columns import PERCENTILES
from thinpipe.lab.netem.network import missing_for_networks
from thinpipe.lab.records.record import Record

MODELS = """
import os, signal
import torch
import torch.distributed as dist
from torch import nn

class Linear(nn.Linear):
    deadly = False

    def forward(self, x):
        if self.deadly and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def small(batch_size):
    return Linear(64, 32), (torch.randn(batch_size, 64),), lambda out: out.square().mean()

def deadly(batch_size):
    Linear.deadly = True
    return small(batch_size)
"""
QUICK = ["bench", "ddp", "--device", "cpu", "--batch-size", "4", "--skip-steps", "2", "--steps", "7"]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "own.py").write_text(MODELS)

    def run(*arguments):
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        path = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
        environment |= {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}  # torchrun leaves a folder
        given = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = ["-m", *arguments]
        with Program(*command, **given) as process:
            out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return run


def test_starts_replicas_prints_and_keeps_every_group(run, tmp_path):
    done = run(
        "thinpipe", *QUICK, "--workers", "2", "--model", "own:small", "--compress", "uniform:8",
        "--json", "r.json", "--markdown", "r.md", "--plot", "r.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["wrote r.json", "wrote r.md", "wrote r.png"]
    record = Record.read(tmp_path / "r.json")
    assert [(row["group"], row["replicas"], row["ddp"]) for row in record.rows] == [
        ("no ddp", 1, "no ddp"),
        ("1M/1C", 1, "ddp"),
        ("1M/2C", 2, "ddp"),
    ]
    assert done.stdout.count("own:small with batch size 4") == 1
    assert re.findall(r"^own:small, (\d) CPUs, (.*?): p50 ", done.stdout, re.MULTILINE) == [
        ("1", "no ddp"),
        ("1", "1M/1C"),
        ("2", "1M/2C"),
    ]
    for row in record.rows:
        assert len(row["samples_s"]) == 7
        for p in PERCENTILES:
            assert row[f"p{p}_s"] == np.percentile(row["samples_s"], p)
        assert row["gradient_bytes"] == 4 * (64 * 32 + 32)
    assert record.rows[0]["wire_bytes"] is None
    assert 64 * 32 < record.rows[2]["wire_bytes"] < record.rows[2]["gradient_bytes"] / 3
    assert record.config["backend"] == "gloo"
    assert "| 2 | 1M/2C |" in (tmp_path / "r.md").read_text()


def test_joins_under_torchrun_and_one_replica_prints(run, tmp_path):
    meeting = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]  # as in docs/ddp.md
    launch = ["torch.distributed.run", "--nproc-per-node=2", *meeting, "-m", "thinpipe"]
    done = run(*launch, *QUICK, "--model", "own:small", "--hook", "fp16", "--json", "r.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("with batch size") == 1
    assert [row["group"] for row in Record.read(tmp_path / "r.json").rows] == ["no ddp", "1M/1C", "1M/2C"]


def test_a_replica_that_dies_ends_the_run_with_its_name(run):
    done = run("thinpipe", *QUICK, "--workers", "2", "--model", "own:deadly")
    assert done.returncode == 1
    assert "1M/1C" in done.stdout
    assert "1M/2C" not in done.stdout
    assert "worker 1: killed by signal 9" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet18"], "--model is one of resnet50"),
        (["--device", "cpu", "--backend", "nccl"], "joins GPUs"),
        (["--compress", "bogus"], "there is no codec 'bogus'"),
        (["--device", "cpu", "--json", "none/r.json"], "a directory that can be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = CliRunner().invoke(app, ["bench", "ddp", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("thinpipe: ")
    assert message in line


def test_torchrun_sets_the_number_of_replicas(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["bench", "ddp", "--device", "cpu", "--workers", "2"])
    assert result.exit_code == 2
    assert "leave out --workers 2" in result.stderr


def test_a_link_that_cannot_be_made(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    result = CliRunner().invoke(app, ["bench", "ddp", "--device", "cpu", "--link", "100mbit"])
    assert result.exit_code == 2
    assert "which needs Linux, root" in result.stderr


@pytest.mark.skipif(missing_for_networks() is not None, reason=f"no {missing_for_networks()} here")
def test_a_thin_link_joins_two_replicas(run, tmp_path):
    done = run("thinpipe", *QUICK, "--model", "own:small", "--link", "100mbit", "--json", "r.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("with batch size") == 1
    record = Record.read(tmp_path / "r.json")
    assert [row["group"] for row in record.rows] == ["no ddp", "1M/1C", "2M/1C"]
    assert record.config["link_mbit_per_s"] == 100
