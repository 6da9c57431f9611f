"""A trained model goes home: as a folder that transformers loads, whoever held its layers."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from tests.pool import Pool
from tests.train.toy import Recorder, ToyTask, run_toy, saved_model, settings_for, world_in
from thinpipe.cli.app import app
from thinpipe.comm.streams import HashedPieces
from thinpipe.train import worker
from thinpipe.train.checkpoints.folder import checkpoints
from thinpipe.train.checkpoints.saving import UnsavedError
from thinpipe.train.export import Export
from thinpipe.train.loop import Loop
from thinpipe.train.models.save import ModelFolder
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.task import Shape
from thinpipe.train.tasks.tasks import TASKS, task

TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 30
GIVEN: dict[str, Any] = {"tokens": 8, "samples": 16, "batch_size": 8, "chunks": 2, "lr": 0.01, "compress": "none"}
TOKENS = torch.randint(2, 100, (8, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings, and a text."""
    from tests.train.tasks.written import write_language_model  # workers need none of what that imports

    folder = tmp_path_factory.mktemp("home")
    write_language_model(folder / "model", TEXT, tied=True)
    (folder / "model" / "generation_config.json").write_text('{"max_new_tokens": 3}')
    (folder / "text.txt").write_text(TEXT)
    return folder


class Kept(Loop):
    """The loop of the last run in this process."""

    last: Loop

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Kept.last = self


def train_home(group: Any, home: Path, running: RunOptions, given: dict[str, Any], fault: str = "") -> Any:
    """Train; the logits of what was trained, where they end up, or the error. Only the client may write."""
    here = world_in(group)
    if here.worker and running.export is not None:
        running = replace(running, export=Path("/nowhere/at/all"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "Loop", Kept)
        if fault == "full":
            patch.setattr(ModelFolder, "_write", full_disk)
        if fault == "changed" and here.worker == 1:
            patch.setattr(HashedPieces, "hexdigest", lambda self: "other")
        lm = task("lm")
        settings = settings_for(lm, group, **{"model": str(home / "model"), "data": str(home / "text.txt")} | given)
        try:
            worker.train(lm, settings, running, here, Recorder)
        except UnsavedError as error:
            return str(error)
    engine = Kept.last.engine
    engine.set_training(False)
    found = engine.predict((TOKENS,) if engine.reads_inputs else None)
    with torch.no_grad():
        return None if found is None else engine.loss._head.logits(found, slice(None))  # type: ignore[union-attr]


def full_disk(folder: ModelFolder, name: str, data: Any, offset: int) -> None:
    """Headers find room, and no tensor does."""
    if offset:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check(folder: Path, logits: Tensor, home: Path) -> None:
    """It is loaded by transformers, computes what was trained, generates, and has its tokenizer."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, logits, rtol=0, atol=1e-5)
    assert model.generate(TOKENS[:1, :4], do_sample=False).shape == (1, 4 + 3)  # as the folder that it came from says
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    assert tokens == AutoTokenizer.from_pretrained(home / "model")(TEXT)["input_ids"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def export(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.parametrize("local", [False, True], ids=["shared", "local"])
def test_three_workers_train_and_export_and_so_does_their_checkpoint(
    pool: Pool, home: Path, tmp_path: Path, local: bool
) -> None:
    running = RunOptions(save=tmp_path / "run", save_local=local, export=tmp_path / "out")
    logits = pool.run(train_home, 3, home, running, GIVEN)[0]
    check(tmp_path / "out", logits, home)
    done = export(tmp_path / "run", tmp_path / "later")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"wrote {tmp_path / 'later'}: LlamaForCausalLM, step 2 of 2\n"
    assert contents(tmp_path / "later") == contents(tmp_path / "out")
    card = (tmp_path / "later" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    for line in ("trained from `model`", "| steps | 2 of 2 |", "| sent between workers | ", '"lr": 0.01'):
        assert line in card
    assert str(home) not in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later", "out", "run"]


@pytest.mark.parametrize(("workers", "parallel"), [(1, "none"), (2, "data"), (2, "pipeline")])
def test_whatever_is_parallel(pool: Pool, home: Path, tmp_path: Path, workers: int, parallel: str) -> None:
    given = GIVEN | {"parallel": parallel} | ({} if parallel == "pipeline" else {"chunks": 1, "pretrained": False})
    running = RunOptions(export=tmp_path / "out")
    if workers == 1:
        logits = train_home(None, home, running, given)
    else:
        logits = pool.run(train_home, workers, home, running, given)[0]
    check(tmp_path / "out", logits, home)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("full", "/out: No space left on device"),
        ("changed", "the tensors of worker 1 were changed on their way to the client"),
    ],
)
@pytest.mark.parametrize("saves", [True, False])
def test_a_failed_export_is_one_line_and_loses_no_run(
    pool: Pool, home: Path, tmp_path: Path, fault: str, message: str, saves: bool
) -> None:
    running = RunOptions(save=tmp_path / "run" if saves else None, export=tmp_path / "out")
    errors = pool.run(train_home, 3, home, running, GIVEN, fault)
    assert len(errors[0].splitlines()) == 1
    assert errors[0].startswith("the run came to its end, but its model was not exported: ")
    assert message in errors[0]
    if saves:
        assert errors[0].endswith(f"thinpipe export {tmp_path / 'run'} {tmp_path / 'out'}")
        assert len(checkpoints(tmp_path / "run")) == 1
    else:
        assert "give save too the next time" in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if saves else [])


def test_a_task_builds_its_model_again_without_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"parallel": "none", "batch_size": 16, "samples": 16, "width": 0.25, "epochs": 1}
    run_toy(None, task("grammar"), RunOptions(save=tmp_path / "run"), **given)
    monkeypatch.delattr(type(task("grammar")), "load")
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.exit_code == 0, done.output
    model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    saved = saved_model(tmp_path / "run")
    assert all(torch.equal(tensor, saved[f"model/{name}"]) for name, tensor in model.state_dict().items())
    assert "sent between workers" not in (tmp_path / "out" / "README.md").read_text()


def test_untrained_tensors_are_exported_unchanged(home: Path, tmp_path: Path) -> None:
    """A vision tower in a language model, say: in the folder, and in no unit."""
    found = task("lm")
    source = {"model": str(home / "model"), "data": str(home / "text.txt"), "parallel": "none", "chunks": 1}
    settings = settings_for(found, None, **GIVEN | source)
    built = found.build(Shape(classes=1), settings.source)
    prepared = Export.of(tmp_path / "out", built, found, settings, {})
    rest = prepared.untrained(prepared.missing(n for n in prepared.form.held if ".layers.1." not in n), built)
    assert len(rest) == 9
    theirs = load_file(home / "model" / "model.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in rest.items())


def test_a_model_with_more_layers_is_not_the_runs(home: Path, tmp_path: Path) -> None:
    """Its first layers would be those of the run, and the others those of the folder."""
    shutil.copytree(home / "model", tmp_path / "model")
    train_home(None, home, RunOptions(save=tmp_path / "run"), GIVEN | {"parallel": "none", "chunks": 1})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    done = export(tmp_path / "run", tmp_path / "out", "--model", tmp_path / "model")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert "the run's model had 30 tensors, and LlamaForCausalLM has 39 here: name the run's own --model" in line
    assert not (tmp_path / "out").exists()
    assert export(tmp_path / "run", tmp_path / "out", "--model", home / "model").exit_code == 0


@pytest.fixture
def toy_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two checkpoints of a model that is none of transformers."""
    monkeypatch.setitem(TASKS, "toy", ToyTask("batchnorm"))
    run_toy(None, ToyTask("batchnorm"), RunOptions(save=tmp_path / "run"), parallel="none")
    return tmp_path / "run"


def test_another_model_becomes_its_weights(toy_run: Path, tmp_path: Path) -> None:
    done = export(toy_run, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "Sequential is not a model that transformers could build" in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.safetensors"]
    model = ToyTask("batchnorm").build(None, None)  # type: ignore[arg-type]
    load_model(model, tmp_path / "out" / "model.safetensors")
    saved = saved_model(toy_run)
    assert {f"model/{name}" for name in model.state_dict()} == saved.keys()
    assert all(torch.equal(tensor, saved[f"model/{name}"]) for name, tensor in model.state_dict().items())


def test_a_run_that_is_complete_is_exported_when_it_should_go_on(toy_run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", "--resume", str(toy_run), "--export", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "this run is complete" in done.stdout
    assert f"wrote {tmp_path / 'out'}: Sequential, step 8 of 8" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(toy_run: Path, tmp_path: Path) -> None:
    older, newest = checkpoints(toy_run)
    os.truncate(newest / "part-0.safetensors", 100)
    before = sorted(tmp_path.iterdir())
    done = export(newest, tmp_path / "new" / "out")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"thinpipe: {newest} is damaged: part-0.safetensors has 100 bytes")
    assert sorted(tmp_path.iterdir()) == before
    done = export(toy_run, tmp_path / "out")
    assert done.exit_code == 0
    assert done.stderr.startswith(f"thinpipe: {newest.name} is damaged: part-0.safetensors has 100 bytes")
    assert f"taking {older.name}" in done.stderr


def test_impossible_exports_are_one_line(toy_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for run, directory, message in (
        (tmp_path / "full", "out", "RUN is a folder that a run was saved in, or one checkpoint of it; "),
        (tmp_path / "none", "out", "has none"),
        (toy_run, "full", "is there and not empty; name another, or remove it"),
        (toy_run, "full/file", "is something else"),
        (toy_run, "full/file/below", "DIR needs a directory that is there or can be made"),
        (toy_run, "/proc/none/out", "DIR needs a directory that is there or can be made"),
    ):
        done = export(run, tmp_path / directory)
        assert done.exit_code == 2, done.output
        (line,) = done.stderr.splitlines()
        assert line.startswith("thinpipe: ")
        assert message in line
    monkeypatch.setattr(ModelFolder, "_write", full_disk)
    done = export(toy_run, tmp_path / "out")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == f"thinpipe: {tmp_path / 'out'} is not written: No space left on device"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "run"]
