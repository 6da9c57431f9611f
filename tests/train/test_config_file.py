"""YAML files of options: written and read back for every option, merged with the command line, and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from thinpipe.cli.app import app
from thinpipe.cli.train import _KINDS as KINDS
from thinpipe.options import options_of
from thinpipe.train.config_file import merge, read_config, write_config
from thinpipe.train.resolve import resolve_run
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.settings import Settings

LINEAR, ADAMW = {"layout": "linear", "client_layers": None}, {"optimizer": "adamw"}
DATA, LORA, SAVE = {"parallel": "data"}, {"lora": 4}, {"save": Path("saved")}
CAPTURE = {"capture": Path("c.safetensors")}
# Option -> a value other than its default, as the command line parses it, and the options that it needs.
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "task": ("grammar", {}),
    "data": (Path("data"), {}),
    "validation": (Path("other"), {}),
    "model": ("org/name", {}),
    "config": ("llama", {}),
    "config_set": ('hidden_size=64,layer_types=["a","b"]', {"config": "llama"}),
    "tokenizer": ("org/tokens", {}),
    "vocabulary": (300, {}),
    "chat_template": (Path("chat.jinja"), {}),
    "dtype": ("bfloat16", {}),
    "attention": ("eager", {}),
    "trust_remote_code": (True, {}),
    "weights": (Path("weights"), {}),
    "pretrained": (False, {}),
    "image_size": (16, {}),
    "tokens": (128, {}),
    "width": (0.5, {}),
    "packing": (True, {}),
    "samples": (1000, {}),
    "lora": (8, {}),
    "lora_target": ("q_proj,v_proj", LORA),
    "lora_alpha": (7.5, LORA),
    "lora_dropout": (0.1, LORA),
    "quantize": ("nf4", LORA),
    "freeze": (["*.embed.*", "head: yes, 'quoted'"], {}),
    "batch_size": (128, {}),
    "chunks": (2, {}),
    "epochs": (3, {}),
    "optimizer": ("adamw", {}),
    "lr": (2e-5, {}),
    "lr_schedule": ("linear", {}),
    "warmup": (0.03, {}),
    "momentum": (0.8, {}),
    "weight_decay": (1e-4, {}),
    "clip_norm": (1.5, {}),
    "client_layers": ("2,1", {}),
    "cuts": ("2,5", {}),
    "parallel": ("data", {}),
    "workers": (3, {}),
    "layout": ("linear", {}),
    "schedule": ("1f1b:3", {}),
    "compress_forward": ("sort:6+2", {}),
    "compress_backward": ("none", {}),
    "auto_every": (30, {"compress": "auto:2-8"}),
    "accumulate": (2, {}),
    "dpo_beta": (0.3, {}),
    "early_stopping": (3, {}),
    "nesterov": (True, {}),
    "adam_betas": ("0.9,0.95", ADAMW),
    "amp": (True, {}),
    "recompute": (True, {}),
    "compile": (True, {}),
    "seed": (4_294_967_295, {}),
    "device": ("cpu", {}),
    "threads": (1, {}),
    "error_feedback": (False, DATA),
    "activation_cache": (Path("kept"), {}),
    "activation_cache_limit": ("1.5GiB", {}),
    "link": ("100mbit/20mbit,40ms,0.1%", {}),
    "memory_limit": ("2GB", {}),
    "in_process": (True, {}),
    "steps": (7, {}),
    "evaluate_every": (5, {}),
    "trace": (Path("step.png"), {}),
    "save": (Path("a folder: of mine"), {}),
    "save_every": ("10min", SAVE),
    "keep": (3, SAVE),
    "keep_best": (False, SAVE),
    "save_local": (True, SAVE),
    "export": (Path("model"), {}),
    "merge": (True, LORA | {"export": Path("model"), "model": "org/name"}),
    "resume": (Path("saved/best"), {}),
    "max_restarts": (2, SAVE),
    "mirror_every": (5, {}),
    "min_servers": (1, {"mirror_every": 5}),
    "patience": (90.0, {}),
    "capture": (Path("c.safetensors"), {}),
    "capture_steps": ("10,100", CAPTURE),
    "capture_chunks": (2, CAPTURE),
    "capture_limit": ("2MB", CAPTURE),
}


def given_with(**options: Any) -> dict[str, Any]:
    """All options as the command line passes them on."""
    names = {each.name: None for kind in KINDS for each in options_of(kind).values()}
    return names | {"device": "cpu"} | options


def written(path: Path, given: dict[str, Any]) -> tuple[Settings, RunOptions]:
    settings, running = resolve_run(given)
    write_config(path, KINDS, settings, running, given)
    return settings, running


@pytest.mark.parametrize(
    "name", [each.name for kind in (Settings, RunOptions, Capture) for each in options_of(kind).values()]
)
def test_every_option_is_read_back_as_it_was_written(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinpipe.train.running.is_served", lambda: name in ("mirror_every", "min_servers"))
    value, needed = VALUES[name]
    given, path = given_with(**needed, **{name: value}), tmp_path / "run.yaml"
    if name == "resume":  # its settings are in a checkpoint, which is not there
        path.write_text("resume: saved/best\n")
        assert read_config(path, KINDS)["resume"] == value
        return
    settings, running = written(path, given)
    assert (settings, running) != resolve_run(given_with(**needed))[:2] or name in ("device", "weights")
    assert resolve_run(merge(read_config(path, KINDS), given_with(device=None))) == (settings, running)


def test_a_resumed_runs_own_save_options_are_written(tmp_path: Path) -> None:
    settings, _ = resolve_run(given_with())
    running = RunOptions(save=tmp_path / "saved", save_every="2h", keep=7)  # as its manifest has them
    write_config(tmp_path / "run.yaml", KINDS, settings, running, given_with())
    found = read_config(tmp_path / "run.yaml", KINDS)
    assert (found["save"], found["save_every"], found["keep"]) == (tmp_path / "saved", "2h", 7)


def test_a_file_is_grouped_and_plain(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    written(path, given_with(lr=2e-5, save=Path("saved"), freeze=["*.embed.*"], rank=0, compress="4bit"))
    text = path.read_text()
    assert (
        text.index("# Task, data and model\n") < text.index("# Training\n") < text.index("# Checkpoints and export\n")
    )
    loaded = yaml.safe_load(text)
    assert loaded["lr"] == 2e-5
    assert loaded["freeze"] == ["*.embed.*"]
    assert loaded["compress-backward"] == resolve_run(given_with(compress="4bit"))[0].compress_backward
    assert loaded["error-feedback"] is True
    assert loaded.keys().isdisjoint({"rank", "compress", "data"})
    assert list(tmp_path.iterdir()) == [path]


def test_values_are_read_as_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "# a comment\nlearning_rate: 2e-5\nbatch-size: 010\nclient-layers: [2, 1]\namp: off\nclip_norm: null\n"
        'compress: none\nseed: "7"\nfreeze: "*.embed.*"\ngradient-checkpointing: yes\nsave-every: 100\n'
    )
    assert read_config(path, KINDS) == {
        **{"lr": 2e-5, "batch_size": 10, "client_layers": "2,1", "amp": False, "clip_norm": None, "compress": "none"},
        **{"seed": 7, "freeze": ["*.embed.*"], "recompute": True, "save_every": "100"},
    }


@pytest.mark.parametrize(
    ("file", "typed", "expected"),
    [
        ("lr: 1\nseed: 3\n", {"lr": 0.5}, {"lr": 0.5, "seed": 3}),
        (
            "compress-forward: none\ncompress-backward: fp16\n",
            {"compress": "8bit"},
            {"compress_backward": "tile:8+zero"},
        ),
        ("compress: none\n", {"compress_forward": "fp16"}, {"compress_forward": "fp16", "compress_backward": "none"}),
        ("freeze: [a]\n", {"freeze": []}, {"freeze": ("a",)}),
    ],
)
def test_the_command_line_wins(tmp_path: Path, file: str, typed: dict[str, Any], expected: dict[str, Any]) -> None:
    (tmp_path / "run.yaml").write_text(file)
    settings, _ = resolve_run(merge(read_config(tmp_path / "run.yaml", KINDS), given_with(**typed)))
    assert {name: getattr(settings, name) for name in expected} == expected


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", r"learning_rat is no option \(did you mean learning_rate\?\); keys are"),
        ("bathc-size: 1", r"bathc_size is no option \(did you mean batch_size\?\)"),
        ("lr: fast", "lr: it is a number; got fast"),
        ("epochs: 1.5", "epochs: it is a whole number; got 1.5"),
        ("epochs: [1, 2]", "epochs: it is a whole number; got 1,2"),
        ("amp: 1", "amp: it is true or false; got 1"),
        ("lr: 0", r"lr is above 0 and at most 1e\+06; got 0"),
        ("optimizer: adam", "optimizer is sgd, adamw; got adam"),
        ("client_layers: 1", "client_layers: is two numbers, as in 1,1; got 1"),
        ("capture-limit: 5", "capture_limit: a size is a number with its unit"),
        ("lr: {a: 1}", "lr: it is one value, or a list of them"),
        ("freeze: [[a]]", "freeze: it is one value, or a list of them"),
        ("lr: 1\nlr: 2", "line 2: lr is in line 1 already"),
        ("batch-size: 1\nbatch_size: 2", "line 2: batch_size is in line 1 already"),
        ("{lr: 1, lr: 2}", "line 1: lr is in line 1 already"),
        ("lr: 1\nlearning_rate: 1", "lr and learning_rate are the same option: give one of them"),
        (BOMB, r"line 2: \*a: write the value itself"),
        ("<<: {lr: 1}", "<< is no option"),
        ("lr: !!python/object/apply:os.getpid []", "line 1: keys are names of options, and values have no tags"),
        ("? [a]\n: 1", "line 1: keys are names"),
        ("- lr", "is no mapping of options to values, as in task: digits"),
        ("", "is no mapping"),
        ("lr: 1\n---\nlr: 2", "line 2 cannot be read as a YAML file of options: but found another document"),
        ("lr: [1", "line 1 cannot be read as a YAML file of options"),
        ("lr:\t1\n\tx: 1", "cannot be read as a YAML file of options"),
        ("lr: \x01", "cannot be read as a YAML file of options"),
        ("[" * 40_000 + "]" * 40_000, "nested too deeply"),
        ("#" * 100_001, "it has 100 kB, more than 100 kB"),
    ],
)
def test_bad_files_are_one_line_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        read_config(path, KINDS)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < len(str(path)) + 200


def test_a_run_is_started_from_a_file_and_writes_it_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(
        "task: digits\nsamples: 64\nbatch-size: 16\nimage_size: 16\nsteps: 1\nthreads: 1\nparallel: none\n"
    )
    result = CliRunner().invoke(app, ["train", str(first), "--seed", "5", "--save-config", str(second)])
    assert result.exit_code == 0, result.output
    assert {"seed: 5", "samples: 64", "steps: 1", "parallel: none"} <= set(second.read_text().splitlines())
    again = ["train", str(second), "--save-config", str(first)]
    assert CliRunner().invoke(app, again).exit_code == 0
    assert first.read_text() == second.read_text()
    (tmp_path / "wrong.yaml").write_text("epoch: 3\n")
    for name, problem in (("wrong.yaml", "epoch is no option (did you mean epochs?)"), ("none.yaml", "cannot be read")):
        result = CliRunner().invoke(app, ["train", str(tmp_path / name)])
        assert result.exit_code == 2
        assert f"thinpipe: {tmp_path / name}" in result.stderr
        assert problem in result.stderr
    result = CliRunner().invoke(app, ["train", str(first), "--save-config", str(tmp_path)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
