"""Adapters that training brought home, evaluated and generated with over two workers: what peft does with them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPT2Config
from typer.testing import CliRunner

from tests.pool import Pool
from tests.train.generation.test_generate import wanted, work
from tests.train.test_export import home, train_home  # noqa: F401
from tests.train.test_lora import LORA
from tests.train.toy import world_in
from thinpipe.cli.app import app
from thinpipe.train.engines.world import SetupError
from thinpipe.train.evaluation import EvaluationResult, evaluate_on_worker
from thinpipe.train.generation.worker import GenerationRun
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.resolve import resolve_evaluation
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.tasks import task

GPT2 = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=300, n_positions=128, bos_token_id=0, eos_token_id=1)


def settings_of(folder: Path, **given: Any) -> Settings:
    """As of `thinpipe evaluate --adapter`, which finds the model."""
    chosen = {"data": str(folder / "text.txt"), "tokens": 8, "batch_size": 8, "compress": "none", "device": "cpu"}
    return resolve_evaluation(None, chosen | given, SavedAdapter(folder / "adapter"))


def use_here(group: dist.ProcessGroup, folder: Path) -> tuple[EvaluationResult, list[GenerationRun]]:
    """Train adapters and export them; evaluate and generate with what was exported, if all have the same."""
    train_home(group, folder, RunOptions(export=folder / "adapter"), LORA)
    world, adapter = world_in(group), SavedAdapter(folder / "adapter")
    settings = settings_of(folder, workers=world.workers)
    evaluated = evaluate_on_worker(world, settings, None, adapter, "validation")
    if world.worker:
        shutil.copytree(adapter.folder, folder / "other")
        adapter = SavedAdapter(folder / "other")
        with (adapter.folder / "adapter_model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\0")
    with pytest.raises(SetupError, match="these differ:\n  adapter: "):
        evaluate_on_worker(world, settings, None, adapter, "validation")
    return evaluated, work(group, folder / "model", {"adapter": str(folder / "adapter")})


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_two_workers_compute_like_peft(pool: Pool, home: Path, tmp_path: Path, kind: str) -> None:  # noqa: F811
    from peft import PeftModel

    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    if kind == "gpt2":
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(GPT2).save_pretrained(model)
    (evaluated, (run,)), _ = pool.run(use_here, 2, tmp_path)
    settings = settings_of(tmp_path)
    assert (settings.model, settings.tokenizer) == (str(model), str(adapter))
    assert run.tokens == wanted(model, adapter)
    assert run.tokens != wanted(model)
    data = task("lm").load(settings.source)[0].validation
    batch = data.batch(torch.arange(len(data)))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)

    def loss() -> float:
        with torch.no_grad():
            return cross_entropy(adapted(*batch.inputs).logits.flatten(0, 1), batch.labels.flatten()).item()

    assert evaluated.found.loss == pytest.approx(loss(), rel=1e-6)
    with adapted.disable_adapter():
        assert evaluated.found.loss != pytest.approx(loss(), rel=1e-3)
    alone = settings_of(tmp_path, parallel="none")
    found = evaluate_on_worker(world_in(None), alone, None, SavedAdapter(adapter), "validation")
    assert found.found.loss == pytest.approx(evaluated.found.loss, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["evaluate"], "--adapter is a folder of adapters that peft, or --export, wrote"),
        (["generate", "a"], "--adapter is a folder of adapters that peft, or --export, wrote"),
        (["evaluate", "--run", "run"], "--run and --adapter both bring weights: give one of them"),
        (["evaluate", "--config", "llama"], "--adapter belongs to the weights of a model: leave out --config"),
        (["evaluate", "--no-pretrained"], "--adapter belongs to the weights of a model: leave out --no-pretrained"),
    ],
)
def test_invalid_options_are_one_line(tmp_path: Path, arguments: list[str], line: str) -> None:
    done = CliRunner().invoke(app, [*arguments, "--adapter", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1
