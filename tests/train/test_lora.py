"""Runs with adapters: trained, saved, taken up again and brought home in peft's format, whoever held the layers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, Qwen2Config
from typer.testing import CliRunner

from tests.pool import Pool
from tests.train.test_export import GIVEN, TOKENS, contents, export, home, train_home  # noqa: F401
from tests.train.toy import run_toy, world_in
from thinpipe.cli.app import app
from thinpipe.train.checkpoints.folder import newest
from thinpipe.train.data import check_possible
from thinpipe.train.evaluation import evaluate_on_worker
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.resolve import resolve_evaluation
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.tasks import task

LORA: dict[str, Any] = GIVEN | {"lora": 4, "lr": 0.02, "optimizer": "adamw", "epochs": 2}


def adapted_logits(model: Path, adapter: Path) -> Tensor:
    from peft import PeftModel

    with torch.no_grad():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)(TOKENS).logits


def logits_of(folder: Path) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits


def saved_names(run: Path) -> list[str]:
    names = []
    for part in sorted(newest(run).glob("part-*.safetensors")):
        with safe_open(part, framework="pt") as file:
            names += list(file.keys())
    return names


def test_three_workers_bring_adapters_home(pool: Pool, home: Path, tmp_path: Path) -> None:  # noqa: F811
    running = RunOptions(save=tmp_path / "run", export=tmp_path / "out")
    logits = pool.run(train_home, 3, home, running, LORA)[0]
    assert (logits - logits_of(home / "model")).abs().max() > 1e-3  # it has learned
    torch.testing.assert_close(adapted_logits(home / "model", tmp_path / "out"), logits, rtol=0, atol=1e-5)
    names = set(load_file(tmp_path / "out" / "adapter_model.safetensors"))
    assert len(names) == 3 * 2 * 2  # layers, of which two linear ones each, with two matrices each
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in card
    assert 'model = PeftModel.from_pretrained(model, "out")' in card
    for folder, more in (("later", []), ("merged", ["--merge"])):
        done = export(tmp_path / "run", tmp_path / folder, *more)
        assert done.exit_code == 0, done.output
    assert contents(tmp_path / "later") == contents(tmp_path / "out")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), logits, rtol=0, atol=1e-5)
    for kind in ("model", "optimizer"):
        kept = [name for name in saved_names(tmp_path / "run") if name.startswith(f"{kind}/")]
        assert kept
        assert all(".lora_A." in name or ".lora_B." in name for name in kept)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=300, n_positions=32, bos_token_id=0, eos_token_id=1),
        Qwen2Config(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=300,
            tie_word_embeddings=True,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_adapters_of_other_architectures_come_home_too(
    pool: Pool,
    home: Path,  # noqa: F811
    tmp_path: Path,
    config: Any,
) -> None:
    """GPT-2 has its weights transposed, Qwen2 biases."""
    shutil.copytree(home, tmp_path / "home")
    model = tmp_path / "home" / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    running = RunOptions(save=tmp_path / "run", export=tmp_path / "out")
    logits = pool.run(train_home, 3, tmp_path / "home", running, LORA)[0]
    assert (logits - logits_of(model)).abs().max() > 1e-3  # it has learned
    torch.testing.assert_close(adapted_logits(model, tmp_path / "out"), logits, rtol=0, atol=1e-5)
    done = export(tmp_path / "run", tmp_path / "merged", "--merge")
    assert done.exit_code == 0, done.output
    torch.testing.assert_close(logits_of(tmp_path / "merged"), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("workers", "parallel"), [(1, "none"), (2, "data"), (2, "pipeline")])
def test_merged_when_a_run_ends(
    pool: Pool,
    home: Path,  # noqa: F811
    tmp_path: Path,
    workers: int,
    parallel: str,
) -> None:
    given = LORA | {"parallel": parallel, "lora_target": "all-linear"}
    running = RunOptions(save=tmp_path / "run", export=tmp_path / "out", merge=True)
    if workers == 1:
        logits = train_home(None, home, running, given | {"chunks": 1})
    else:
        logits = pool.run(train_home, workers, home, running, given)[0]
    torch.testing.assert_close(logits_of(tmp_path / "out"), logits, rtol=0, atol=1e-5)
    assert export(tmp_path / "run", tmp_path / "adapter").exit_code == 0
    torch.testing.assert_close(adapted_logits(home / "model", tmp_path / "adapter"), logits, rtol=0, atol=1e-5)


def test_it_resumes_bit_identically(
    pool: Pool,
    home: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    given = LORA | {"freeze": ("*.layers.0.*",)}
    whole = pool.run(train_home, 2, home, RunOptions(save=tmp_path / "whole"), given)[0]
    first = RunOptions(save=tmp_path / "run", save_every=1, steps=2)
    pool.run(train_home, 2, home, first, given)
    names = [name for name in saved_names(tmp_path / "run") if name.startswith("model/")]
    assert names
    assert all(".layers.1." in name or ".layers.2." in name for name in names)
    again = replace(first, steps=None, resume=tmp_path / "run")
    assert torch.equal(pool.run(train_home, 2, home, again, given)[0], whole)


def test_it_does_not_go_on_with_other_weights(home: Path, tmp_path: Path) -> None:  # noqa: F811
    """A checkpoint has none of those that are frozen."""
    given = LORA | {"parallel": "none", "chunks": 1}
    running = RunOptions(save=tmp_path / "run", save_every=1, steps=1)
    train_home(None, home, running, given)
    shutil.copytree(home, tmp_path / "other")
    file = tmp_path / "other" / "model" / "model.safetensors"
    save_file({name: each + 1e-3 for name, each in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="a run goes on with the weights it began with, and those that are frozen"):
        train_home(None, tmp_path / "other", replace(running, steps=2, resume=tmp_path / "run"), given)


def test_frozen_parameters_come_home_as_they_were(home: Path, tmp_path: Path) -> None:  # noqa: F811
    given = GIVEN | {"parallel": "none", "chunks": 1, "freeze": ("*.embed_tokens.*", "*.layers.0.*")}
    logits = train_home(None, home, RunOptions(save=tmp_path / "run", export=tmp_path / "out"), given)
    done = export(tmp_path / "run", tmp_path / "later")
    assert done.exit_code == 0, done.output
    assert contents(tmp_path / "later") == contents(tmp_path / "out")
    torch.testing.assert_close(logits_of(tmp_path / "out"), logits, rtol=0, atol=1e-5)
    before, after = (load_file(folder / "model.safetensors") for folder in (home / "model", tmp_path / "out"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "embed_tokens" in name or ".layers.0." in name}
    assert not [name for name in saved_names(tmp_path / "run") if "embed_tokens" in name or ".layers.0." in name]


def test_the_head_of_a_classifier_is_trained_and_saved(tmp_path: Path) -> None:
    from peft import PeftModel

    from tests.train.tasks.written import write_text_classifier

    write_text_classifier(tmp_path / "bert")
    rows = "".join(f"{'yes' if number % 2 else 'no'},the word is {number}\n" for number in range(40))
    (tmp_path / "train.csv").write_text(f"label,text\n{rows}")
    given = {"model": str(tmp_path / "bert"), "data": str(tmp_path / "train.csv"), "lora": 4, "epochs": 1}
    more = {"parallel": "none", "batch_size": 8, "chunks": 1, "tokens": 8, "lora_target": "dense"}
    end = run_toy(None, task("texts"), RunOptions(export=tmp_path / "out"), **given, **more).end
    assert end is not None
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name for name in names if "lora" not in name} == {
        "base_model.model.classifier.weight",
        "base_model.model.classifier.bias",
    }
    assert not [name for name in names if "pooler" in name]  # which has a layer of that name, in no block
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert", num_labels=2)
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    held = {
        name.replace(".default", "").replace(".modules_to_save", ""): each for name, each in model.state_dict().items()
    }
    assert all(torch.equal(held[name], each) for name, each in names.items())
    chosen = {"task": "texts", "compress": None, "parallel": "none", "data": given["data"], "tokens": 8}
    adapter = SavedAdapter(tmp_path / "out")
    settings = resolve_evaluation(None, chosen, adapter)
    check_possible(task("texts"), settings, adapter)
    found = evaluate_on_worker(world_in(None), settings, None, adapter, "validation").found
    assert found.loss == pytest.approx(end.validation_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--lora", "4", "--lora-target", "wq"], "all-linear, or some of down_proj, gate_proj, k_proj, o_proj, q_proj"),
        (["--lora-target", "q_proj"], "--lora-target is an option of adapters: give their rank with --lora, as in"),
        (["--freeze", "model.embed*"], ""),
        (["--freeze", "layers.0.*"], "--freeze is a pattern of names of parameters, as in 'model.embed_tokens.*'"),
        (["--freeze", "*"], "--freeze leaves nothing to be trained: freeze less"),
        (["--export", "out", "--merge"], "--merge adds adapters to a model's weights, and without --lora there are"),
        (["--lora", "4", "--merge"], "--merge is for --export: name a folder with it, or leave it out"),
        (
            ["--lora", "4", "--export", "out", "--no-pretrained"],
            "here there are none that could be loaded again: give --merge",
        ),
    ],
)
def test_invalid_options_are_one_line_before_workers_start(
    home: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinpipe.cli.training.run_with_restarts", lambda *_: 0)
    named = ["--model", str(home / "model"), "--data", str(home / "text.txt"), "--tokens", "8"]
    done = CliRunner().invoke(app, ["train", *named, *arguments])
    assert done.exit_code == (2 if line else 0), done.output
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == (1 if line else 0)


def test_an_adapter_alone_is_no_model(home: Path, tmp_path: Path) -> None:  # noqa: F811
    given = LORA | {"parallel": "none", "chunks": 1, "epochs": 1}
    train_home(None, home, RunOptions(export=tmp_path / "out"), given)
    advice = "evaluate and generate take it as --adapter, for all else export it with --merge"
    for arguments in (["train", "--data", str(home / "text.txt")], ["generate", "a client"]):
        done = CliRunner().invoke(app, [*arguments, "--model", str(tmp_path / "out")])
        assert done.exit_code == 2
        assert done.stderr.rstrip().endswith(f"has adapters alone: {advice}")
