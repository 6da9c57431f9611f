"""thinpipe train from the command line: every way to be parallel, what it leaves behind, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.scripts import run_script
from tests.train.toy import ToyTask, run_toy, saved_model
from thinpipe.cli.app import app
from thinpipe.lab.netem.network import missing_for_networks
from thinpipe.lab.records.record import Record
from thinpipe.launch import workers as launch
from thinpipe.train.resolve import resolve_run
from thinpipe.train.running import RunOptions

THIN = () if missing_for_networks() else ("--link", "2mbit")  # as root on Linux
TINY = ("--samples", "256", "--batch-size", "16", "--image-size", "16", "--threads", "1")

pytestmark = pytest.mark.timeout(240)


def thinpipe(*options: str) -> tuple[int, str]:
    """In this process: what workers say is not heard."""
    result = CliRunner().invoke(app, ["train", *options])
    return result.exit_code, result.output


def run(*options: str) -> tuple[int, str]:
    return run_script("-m", "thinpipe", "train", *TINY, *options, limit_s=200)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A pipeline that was stopped after three steps: where it wrote everything it can, and what it said."""
    directory = tmp_path_factory.mktemp("run")
    outputs = ("--json", "run.json", "--trace", "step.png", "--log", "log", "--save", "saved", "--export", "model")
    files = [part if part.startswith("--") else str(directory / part) for part in outputs]
    code, output = run("--compress", "uniform:8", "--chunks", "2", "--steps", "3", *files)
    assert code == 0, output
    return directory, output


def test_a_pipeline_leaves_table_record_curves_trace_model_and_a_checkpoint(first_run: tuple[Path, str]) -> None:
    directory, output = first_run
    assert "Traffic per step" in output
    assert "Where the time of a step goes" in output
    record = json.loads((directory / "run.json").read_text())
    assert record["kind"] == "train"
    assert record["config"]["compress_forward"] == "uniform:8"
    assert "link_mbit_per_s" not in record["config"]
    assert (directory / "step.png").read_bytes().startswith(b"\x89PNG")
    assert list((directory / "log").iterdir())
    assert (directory / "saved" / "step-00000003" / "manifest.json").is_file()
    assert "thinpipe: MobileNetV2ForImageClassification is not a model that transformers could build" in output
    assert f"the model: {directory / 'model'}\n" in output
    exported, saved = load_file(directory / "model" / "model.safetensors"), saved_model(directory / "saved")
    assert saved.keys() == {f"model/{name}" for name in exported}
    assert all(torch.equal(tensor, saved[f"model/{name}"]) for name, tensor in exported.items())


def test_a_run_resumes_over_another_link(first_run: tuple[Path, str]) -> None:
    saved, path = first_run[0] / "saved", first_run[0] / "rest.json"
    code, output = thinpipe("--resume", str(saved), "--lr", "0.001", "--epochs", "3")
    assert code == 2
    assert "--lr: 0.05 when it was saved, 0.001 now" in output
    assert "--epochs: 10 when it was saved, 3 now" in output

    resume = ("-m", "thinpipe", "train", "--resume", str(saved), "--steps", "11", "--json", str(path))
    code, output = run_script(*resume, *THIN, limit_s=200)
    assert code == 0, output
    assert "goes on after step 3 of 11" in output
    assert "Warning" not in output
    assert (saved / "step-00000011" / "manifest.json").is_file()
    if THIN:
        check_that_the_link_was_thin(Record.read(path))

    code, output = thinpipe("--resume", str(saved), "--steps", "11")
    assert code == 0
    assert "this run is at step 11 of 160 already" in output

    code, output = thinpipe("--save", str(saved))
    assert code == 2
    assert "holds checkpoints of another run" in output


def check_that_the_link_was_thin(record: Record) -> None:
    """Its steps took at least the time that their bytes take at its rate."""
    assert record.config["link_mbit_per_s"] == 2
    (row,) = record.rows
    from_client = sum(link["wire_bytes"] for link in row["links"] if link["source"] in (0, 2))
    assert from_client > 300_000  # so many that the few which pass at once do not matter
    assert row["steps"] * record.config["batch_size"] / row["samples_per_s"] > from_client * 8 / 2e6


@pytest.mark.parametrize("parallel", ["data", "none"])
def test_replicas_and_a_single_process_train(tmp_path: Path, parallel: str) -> None:
    code, output = thinpipe(*TINY, "--parallel", parallel, "--steps", "2", "--json", str(tmp_path / "run.json"))
    assert code == 0, output
    row = json.loads((tmp_path / "run.json").read_text())["rows"][0]
    assert (row["parallel"], row["steps"]) == (parallel, 2)


def test_a_complete_run_reports_its_result(tmp_path: Path) -> None:
    recorder = run_toy(None, ToyTask(), RunOptions(save=tmp_path), parallel="none")
    assert recorder.end is not None
    code, output = thinpipe("--resume", str(tmp_path))
    assert code == 0
    assert "this run is complete" in output
    assert f"accuracy {recorder.end.metric:.1%}" in output
    assert recorder.end.parameters_sha256 in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "poetry"], "there is no task 'poetry'"),
        (["--batch-size", "10"], "not a multiple of"),
        (["--compress", "zip:9"], "zip"),
        (["--client-layers", "one"], "two numbers, as in 1,1"),
        (["--adam-betas", "0.9"], "--adam-betas is two numbers, as in 0.9,0.95; got 0.9"),
        (["--adam-betas", "0.9,0.95"], "give --optimizer adamw"),  # as digits is trained with SGD
        (["--max-restarts", "1"], "name a folder for them with --save"),
        (["--parallel", "none", "--trace", "step.png"], "leave it out with --parallel none"),
        (["--parallel", "data", "--capture", "c.safetensors"], "leave it out with --parallel data"),
        (["--capture-steps", "3"], "name its file with --capture"),
        (["--activation-cache-limit", "much"], "as in 100kB, 1.5MB or 4GiB"),
        (["--capture", "c.safetensors", "--capture-steps", "3,x"], "as in 10,100; got 3,x"),
        (["--link", "10mbit,100mbit"], "a run has links of one rate"),
        (["--link", "fast"], "--link is a rate from 1kbit to 600gbit"),
        (["--link", "10mbit,5ms,7ms"], "--link is a rate from 1kbit to 600gbit"),
        (["--link", "none.toml"], "none.toml cannot be read as links of pairs of workers"),
        (["--link", "10mbit", "--parallel", "none"], "--parallel none is one process"),
        (["--data", "nowhere", "--workers", "3"], "task digits takes --image-size, --width, --samples and not --data"),
        (["--task", "cifar10", "--no-pretrained", "--data", "/nowhere"], "/nowhere is none"),
        (["--task", "images", "--data", "/nowhere"], "/nowhere is no folder"),
        (["--task", "texts", "--data", "/nowhere.csv"], "/nowhere.csv is not there"),
        (["--task", "rte", "--weights", "/nowhere"], "/nowhere has no config.json"),
        (["--workers", "40"], "1 and 1 of 20 units"),
        (["--layout", "linear", "--task", "grammar", "--workers", "7"], "got 7 stages and 6 units"),
        (["--resume", "/nowhere"], "no complete checkpoint"),
        (["--log", "/proc/nowhere"], "--log needs a directory"),
    ],
)
def test_invalid_options_are_one_line_before_workers_start(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_workers", lambda *args, **kwargs: pytest.fail("workers were started"))
    code, output = thinpipe(*options)
    assert code == 2
    assert message in output
    assert output.startswith("thinpipe: ")


def test_links_of_torchruns_workers_are_not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    code, output = thinpipe("--link", "10mbit")
    assert code == 2
    assert output == "thinpipe: workers on several machines have their links already: leave out --link\n"


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, output = thinpipe("--help")
    assert code == 0
    assert "Checkpoints" in output
    assert max(map(len, output.splitlines())) <= 80


def test_a_model_of_the_users_is_tuned_as_pretrained_weights_are() -> None:
    """The recipe of texts is for a small model from scratch: its rate would ruin weights that are good already."""
    given = {"task": "texts", "data": Path("rows.csv")}
    scratch, tuned = (resolve_run(given | more)[0] for more in ({}, {"model": "bert"}))
    assert (scratch.lr, tuned.lr) == (5e-4, 2e-5)
    assert resolve_run(given | {"model": "bert", "lr": 1e-5})[0].lr == 1e-5
