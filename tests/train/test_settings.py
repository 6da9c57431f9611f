"""Settings: the recipe where nothing is given, errors that say the rule, and the same settings again on resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.toy import ToyTask
from thinpipe.options import Option, options_of, read
from thinpipe.train.resolve import resolve, resolve_for_resume
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.settings import Settings, Trained
from thinpipe.train.tasks.tasks import task


def resolved(**given: Any) -> Settings:
    return resolve({"task": "toy", **given}, ToyTask.defaults, device="cpu")


def test_missing_options_have_the_tasks_defaults() -> None:
    settings = resolved()
    assert (settings.batch_size, settings.chunks, settings.lr, settings.epochs) == (18, 3, 0.05, 2)
    assert (settings.parallel, settings.workers, settings.compress_backward) == ("pipeline", 2, "tile:8+zero")
    assert settings.client_layers == (1, 1)


def test_given_options_take_precedence() -> None:
    settings = resolved(lr=0.5, compress_backward="none", workers=3, seed=4)
    assert (settings.lr, settings.workers, settings.seed) == (0.5, 3, 4)
    assert (settings.compress_forward, settings.compress_backward) == ("tile:8", "none")


def test_the_last_device_is_for_all_that_follow() -> None:
    assert resolved(workers=3).devices == ["cpu"] * 3
    assert resolved(workers=3, device="cpu,cuda").devices == ["cpu", "cuda", "cuda"]


@pytest.mark.parametrize(("parallel", "workers"), [("data", 2), ("none", 1)])
def test_without_links_nothing_is_compressed_or_chunked_by_default(parallel: str, workers: int) -> None:
    settings = resolved(parallel=parallel)
    assert (settings.compress_forward, settings.chunks, settings.workers) == ("none", 1, workers)
    assert settings.client_layers is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "gpu"}, "device is auto, cpu, cuda, or a list of the last two.*got gpu"),
        ({"device": "cpu,cuda,cuda"}, "device cpu,cuda,cuda names more than the 2 workers"),
        ({"device": "cpu,cuda", "parallel": "data"}, "replicas compute on one kind of device"),
        ({"batch_size": 16}, "not a multiple of 3 chunks; take 15"),
        ({"parallel": "data", "batch_size": 15}, "and 2 replicas; take 14"),
        ({"workers": 1}, "2 workers or more"),
        ({"parallel": "none", "workers": 2}, "one worker"),
        ({"compress": "sort:99"}, "sort"),
        ({"compress": "none", "compress_forward": "sort:8"}, "both directions"),
        ({"parallel": "data", "compress_forward": "sort:8"}, "one codec"),
        ({"compress": "axes:2"}, "is for activations, .* Give gradients another codec, as in tile:4[+]zero"),
        ({"parallel": "none", "compress_forward": "axes:2"}, "the activations of a pipeline"),
        ({"layout": "linear", "client_layers": (1, 1)}, "client_layers is for"),
        ({"parallel": "data", "schedule": "1f1b", "recompute": True}, "schedule, recompute shape a pipeline"),
        ({"error_feedback": False}, "leave out error_feedback=False, or give parallel data instead of pipeline"),
        ({"lr": 0.0}, "lr is above 0 and at most 1e[+]06; got 0.0"),
        ({"warmup": 1.0}, "warmup is from 0 to below 1"),
        ({"epochs": 0}, "epochs is from 1 to 1000000000; got 0"),
        ({"optimizer": "lamb"}, "optimizer is sgd, adamw; got lamb"),
        ({"seed": -1}, "seed"),
        ({"lr": float("inf")}, "lr is above 0 and at most 1e[+]06; got inf"),
        ({"lr": float("nan")}, "lr is above 0 .*; got nan"),
        ({"lr": 1e300}, "lr is above 0"),
        ({"weight_decay": float("inf")}, "weight_decay is from 0 to 1000; got inf"),
        ({"width": float("inf")}, "width is above 0"),
        ({"clip_norm": float("inf")}, "clip_norm is above 0"),
        ({"attention": "flash_attention_2", "dtype": "bfloat16"}, "on GPUs; here are device cpu and dtype bfloat16"),
        ({"attention": "flash_attention_2", "device": "cuda"}, "device cuda and dtype float32: give device cuda and"),
        ({"attention": "flash"}, "attention is sdpa, eager, flash_attention_2; got flash"),
        ({"nesterov": True, "optimizer": "adamw"}, "nesterov looks ahead along SGD's momentum: give optimizer sgd"),
        ({"nesterov": True, "momentum": 0.0}, "and a momentum above 0"),
        ({"momentum": 0.9, "optimizer": "adamw"}, "momentum is SGD's, and optimizer adamw has none: leave it out"),
        ({"adam_betas": (0.9, 0.95)}, "AdamW's running means, and optimizer sgd has none: leave them out, or give"),
        ({"adam_betas": (0.9, 1.0), "optimizer": "adamw"}, "adam_betas is two numbers from 0 to below 1; got 0.9,1.0"),
        ({"adam_betas": (float("nan"), 0.5), "optimizer": "adamw"}, "from 0 to below 1; got nan,0.5"),
        ({"adam_betas": (0.9,), "optimizer": "adamw"}, "adam_betas is two numbers"),
        ({"momentum": float("nan")}, "momentum is from 0 to below 1; got nan"),
        ({"threads": 100_000}, "threads is from 1 to 1024; got 100000"),
        ({"epochs": 10**30}, "epochs is from 1 to"),
        ({"model": "gpt2", "config": "llama"}, "config from its description alone: give one of them"),
        ({"config_set": "hidden_size=3"}, "config_set changes values of config"),
        ({"vocabulary": 100}, "vocabulary is from 257 to"),
    ],
)
def test_conflicting_options_are_an_error_with_the_rule(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(**given)


def test_json_and_back() -> None:
    assert Settings.from_json(resolved(compress="power:4").to_json()) == resolved(compress="power:4")


def test_resuming_needs_no_options_and_accepts_the_same_ones() -> None:
    saved = resolved(lr=0.2, compress="power:4")
    assert resolve_for_resume({"lr": None, "seed": None}, saved) == saved
    assert resolve_for_resume({"lr": 0.2, "compress": "power:4"}, saved) == saved
    assert resolve_for_resume({"schedule": "1f1b"}, resolved(schedule="1f1b:5")) == resolved(schedule="1f1b:5")
    with pytest.raises(ValueError, match=r"schedule.*: 1f1b:5 when it was saved, 1f1b:6 now"):
        resolve_for_resume({"schedule": "1f1b:6"}, resolved(schedule="1f1b:5"))


def test_other_options_are_an_error_that_names_each_with_both_values() -> None:
    with pytest.raises(ValueError, match="these differ") as error:
        resolve_for_resume({"lr": 0.3, "compress": "none", "epochs": 2, "parallel": "none"}, resolved())
    lines = str(error.value).splitlines()
    assert "  lr: 0.05 when it was saved, 0.3 now" in lines
    assert "  compress_forward: tile:8 when it was saved, none now" in lines
    assert "  parallel: pipeline when it was saved, none now" in lines
    assert not any("epochs" in line for line in lines)


def test_adam_betas_are_saved_and_fixed() -> None:
    saved = Settings.from_json(json.loads(json.dumps(resolved(optimizer="adamw", adam_betas=(0.9, 0.95)).to_json())))
    assert saved.adam_betas == (0.9, 0.95)
    assert resolve_for_resume({"adam_betas": (0.9, 0.95)}, saved) == saved
    with pytest.raises(ValueError, match=r"adam_betas: 0\.9,0\.95 when it was saved, 0\.8,0\.99 now"):
        resolve_for_resume({"adam_betas": (0.8, 0.99)}, saved)


def test_placement_and_location_of_data_may_change() -> None:
    moved = {"workers": 4, "client_layers": (2, 2), "data": "/elsewhere", "weights": "/there", "threads": 3}
    assert resolve_for_resume(moved, resolved()) == resolved(**moved)
    line = resolve_for_resume({"layout": "linear"}, resolved())
    assert (line.layout, line.client_layers) == ("linear", None)
    assert resolve_for_resume({"layout": "client-server"}, line).client_layers is None
    with pytest.raises(ValueError, match="client_layers is for layout client-server"):
        resolve_for_resume({"client_layers": (1, 1)}, line)
    with pytest.raises(ValueError, match="layout: client-server when it was saved, linear now"):
        resolve_for_resume({"layout": "linear"}, resolved(parallel="data"))
    with pytest.raises(ValueError, match="and 4 replicas; take 16"):
        resolve_for_resume({"workers": 4}, resolved(parallel="data"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": None}, "its settings: lr cannot be None"),
        ({"workers": True}, "its settings: workers cannot be True"),
        ({"client_layers": [1]}, r"its settings: client_layers cannot be \[1\]"),
        ({"layout": "ring"}, "its settings: layout cannot be 'ring'"),
        ({"prompt": 8}, "its settings have 'prompt', which thinpipe does not know in this version"),
    ],
)
def test_settings_of_another_version_are_an_error_that_names_one(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.from_json(resolved().to_json() | change)


def test_a_missing_setting_behaves_as_versions_without_it() -> None:
    saved = resolved().to_json()
    for name in ("clip_norm", "amp", "recompute", "threads", "samples", "adam_betas"):
        del saved[name]
    assert Settings.from_json(saved) == resolved()
    del saved["lr"]
    with pytest.raises(ValueError, match="its settings have no 'lr'"):
        Settings.from_json(saved)


def test_a_checkpoint_with_the_old_name_of_the_linear_schedule_resumes() -> None:
    saved = resolved(lr_schedule="linear")
    older = Settings.from_json({**saved.to_json(), "lr_schedule": "polynomial"})
    assert older == saved
    assert resolve_for_resume(read(Settings, {"lr_schedule": "polynomial"}), older) == saved


def test_running_checks_itself() -> None:
    with pytest.raises(ValueError, match="save_every needs a folder"):
        RunOptions(save_every=3)
    with pytest.raises(ValueError, match="save_local is about checkpoints"):
        RunOptions(save_local=True)
    with pytest.raises(ValueError, match="trace draws a picture"):
        RunOptions(trace=Path("step.pdf"))


def names(kind: type, holds: Callable[[Option], object]) -> set[str]:
    return {name for name, declared in options_of(kind).items() if holds(declared)}


def test_marks_select_kept_and_moved_options() -> None:
    assert names(Settings, lambda each: each.kept == "always") == {"parallel", "batch_size", "amp", "seed"}
    assert names(Settings, lambda each: each.kept == "same parallel") == {
        *("workers", "layout", "client_layers", "chunks", "compress_forward")
    }
    assert names(Trained, lambda each: each.training_only) == {
        *("lora", "lora_target", "lora_alpha", "lora_dropout", "freeze", "quantize")
    }
    assert names(Trained, lambda each: each.per_machine) == {
        *("data", "validation", "model", "config", "tokenizer", "chat_template", "weights")
    }


def test_workers_compare_options_that_collectives_depend_on() -> None:
    running = RunOptions(save=Path("here"), keep=3, capture=Capture(path=Path("c.safetensors"), steps=(1, 5)))
    shared = running.shared()
    assert shared.keys() == {
        *("save", "resume", "trace", "capture", "export", "save_local", "save_every", "keep", "steps"),
        *("evaluate_every", "patience_s", "merge", "memory_limit", "mirror_every"),
    }
    assert (shared["save"], shared["resume"], shared["keep"]) == (True, False, 3)  # paths may differ
    assert shared["capture"] == [(1, 5), 1, 1 << 30]
    json.dumps(shared | resolved(data="text.txt", threads=2).shared())
    assert {"data", "threads"}.isdisjoint(resolved(data="text.txt", threads=2).shared())


def test_paths_of_settings_are_text_in_json_and_paths_again() -> None:
    settings = resolved(data="text.txt", weights="folder")
    assert (settings.data, settings.source.weights) == (Path("text.txt"), Path("folder"))
    saved = json.loads(json.dumps(settings.to_json()))
    assert saved["data"] == "text.txt"
    assert Settings.from_json(saved) == settings


def test_runs_of_versions_without_packing_go_on_padded() -> None:
    chat = task("chat")
    settings = resolve({"task": "chat", "workers": 2}, chat.defaults, device="cpu")
    saved = settings.to_json()
    assert saved.pop("packing") is True
    assert Settings.from_json(saved).packing is False
    assert resolved().packing is False
