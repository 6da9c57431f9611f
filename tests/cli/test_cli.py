"""The command line, as a user meets it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import thinpipe
from tests.plots import drawn, shown
from thinpipe.cli.app import app
from thinpipe.lab.bench.codecs import verify
from thinpipe.lab.records.record import Check, Record

QUICK = ["bench", "codecs", "--repeat", "1", "--budget", "0.01", "--reference", "none"]
SMALL = [*QUICK, "--compress", "none,fp16,sort:8", "--shape", "2,24,8,8"]


def invoke(*arguments, width=80):
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, [str(argument) for argument in arguments])


def test_version():
    assert invoke("--version").output == f"thinpipe {thinpipe.__version__}\n"


def test_help_names_every_option_family_and_content():
    text = invoke("bench", "codecs", "--help", width=120).output
    options = "--compress --shape --content --from --verify --threads --device --repeat --budget"
    results = "--by-bits --json --markdown --plot"
    for word in (
        *options.split(),
        *results.split(),
        "kmeans",
        "topk",
        "relu6",
        "outliers",
        "laplace",
        "masked",
        "nf4",
        "32,32,112,112",
        "Example",
    ):
        assert word in text


def test_an_older_name_is_accepted_and_reported():
    result = invoke(*QUICK, "--codecs", "fp16", "--shape", "2,3", "--content", "relu6")
    assert result.exit_code == 0
    assert result.stderr == "thinpipe: --codecs is called --compress now\n"
    assert "\nfp16 " in result.stdout
    assert "--codecs" not in invoke("bench", "codecs", "--help").output


def test_prints_plain_tables_to_a_pipe():
    result = invoke(*SMALL)
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"thinpipe {thinpipe.__version__}, torch {torch.__version__.split('+')[0]}")
    assert next(line.split()[:2] for line in lines if line.startswith("sort:6+2")) == ["sort:6+2", "0.253"]
    assert max(map(len, lines[1:])) <= 80  # the first one names the machine


def test_keeps_record_page_and_plot(tmp_path):
    json_path, page, plot = tmp_path / "r.json", tmp_path / "r.md", tmp_path / "r.png"
    with drawn() as figures:
        result = invoke(*SMALL, "--json", json_path, "--markdown", page, "--plot", plot)
    assert result.exit_code == 0
    record = Record.read(json_path)
    assert record.kind == "bench codecs"
    assert len(record.rows) == 9
    assert {row["content"] for row in record.rows} == {"relu6", "outliers", "laplace"}
    assert "| sort:6+2 | 0.253 |" in page.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")
    errors = {
        content: {
            row["codec"].partition(":")[0]: [(row["bits_per_value"], row["relative_error"])]
            for row in record.rows
            if row["content"] == content and row["codec"] != "none"  # which has no error
        }
        for content in ("relu6", "outliers", "laplace")
    }
    assert shown(figures[0]) == errors
    assert [line.split()[1] for line in result.stderr.splitlines()] == [str(json_path), str(page), str(plot)]


def test_compresses_the_tensors_of_a_file(tmp_path):
    path = tmp_path / "tensors.safetensors"
    save_file({"layer.0": torch.randn(4, 50), "grad": torch.randn(4, 50).bfloat16(), "ids": torch.arange(4)}, path)
    result = invoke(*QUICK, "--compress", "fp16,uniform:8", "--from", path, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    rows = Record.read(tmp_path / "r.json").rows
    assert {(row["shape"], row["content"], row["tensor_bytes"]) for row in rows} == {
        ("4x50", "layer.0", 800),
        ("4x50", "grad", 400),
    }


def test_captured_tensors_are_kept_apart_and_shown_together(tmp_path):
    path = tmp_path / "captured.safetensors"
    names = [f"{link}/0/step{step:06d}/chunk0" for link in ("forward/0-1", "backward/1-0") for step in range(20)]
    save_file({name: torch.randn(4, 50) for name in names}, path)
    result = invoke(
        *QUICK, "--compress", "uniform:4+zero,fp16", "--from", path, "--by-bits", "--json", tmp_path / "r.json"
    )
    assert result.exit_code == 0, result.output
    assert {row["content"] for row in Record.read(tmp_path / "r.json").rows} == set(names)
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("4x50")] == [
        "4x50, 0.8 kB, backward/1-0: size and error",
        "4x50, 0.8 kB, forward/0-1: size and error",
        "4x50, 0.8 kB: costs, the slowest of 40 tensors",
    ]
    assert max(map(len, lines[1:])) <= 80


def test_threads_are_set_and_recorded(tmp_path):
    before = torch.get_num_threads()
    try:
        assert invoke(*SMALL, "--threads", 1, "--json", tmp_path / "r.json").exit_code == 0
        assert json.loads((tmp_path / "r.json").read_text())["environment"]["threads"] == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compress", "bogus:3"], "there is no codec 'bogus'"),
        (["--compress", "uniform:17"], "'uniform:17' makes no sense"),
        (["--compress", ","], "got none"),
        (["--shape", "2,x"], "--shape takes whole numbers from 1 to"),
        (["--content", "noise"], "--content is one of relu6, outliers, laplace, heavy, masked; got 'noise'"),
        (["--from", "none.safetensors"], "cannot be read"),
        (["--device", "gpu"], "--device is auto, cpu, or cuda"),
        (["--device", "cuda:99"], "--device is auto, cpu, or cuda"),
        (["--json", "none/r.json"], "a directory that can be written"),
        (["--markdown", "none/r.md"], "a directory that can be written"),
        (["--plot", "none/r.png"], "a directory that can be written"),
        (["--plot", "r.pdf"], "ends in .png"),
        (["--shape", "9999999,9999999"], "takes 800 TB or more, and this machine has "),
        (["--shape", "9" * 400], "--shape takes whole numbers from 1 to 10^18"),
        (["--threads", "100000"], "--threads is from 1 to 1024; got 100000"),
        (["--budget", "inf"], "--budget is from 0 to 1000000 seconds; got inf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("bench", "codecs", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("thinpipe: ")
    assert message in line


@pytest.mark.parametrize(
    ("measured", "required", "exit_code"), [(1, True, 0), (3, True, 1), (3, False, 0)], ids=["kept", "broken", "missed"]
)
def test_only_a_broken_promise_fails_the_run(measured, required, exit_code, monkeypatch, tmp_path):
    check = Check(claim="a promise", measured=measured, limit=2, required=required)
    monkeypatch.setattr("thinpipe.lab.bench.codecs.measure.verify_codecs", lambda cases, device: iter([check]))
    result = invoke(*SMALL, "--verify", "--json", tmp_path / "r.json")
    assert result.exit_code == exit_code
    assert "a promise" in result.stdout
    assert verify.NOTE in result.stdout
    assert Record.read(tmp_path / "r.json").checks == (check,)


def test_runs_as_a_program(tmp_path):
    command = [sys.executable, "-m", "thinpipe", *SMALL, "--json", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"}, check=True)
    assert done.stdout.count("size and error") == done.stdout.count("costs") * 3
    assert done.stderr == f"wrote {tmp_path / 'r.json'}\n"
    assert Record.read(tmp_path / "r.json").config["command"][1:3] == ["bench", "codecs"]


def test_importing_thinpipe_imports_nothing_heavy():
    probe = "import sys, thinpipe; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    assert not {"typer", "rich", "matplotlib", "sklearn", "numba", "safetensors"} & set(loaded)
