"""The offer of a run: nothing of the client's files is in it, and servers rebuild the same run or reject it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.tasks.written import write_language_model
from thinpipe.system import imports
from thinpipe.train.evaluation import evaluate_on_worker
from thinpipe.train.generation.printing import generate_on_worker
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.resolve import resolve_run
from thinpipe.train.running import RunOptions
from thinpipe.train.serve.jobs import Job, rebuild
from thinpipe.train.serve.model_cache import ModelCache
from thinpipe.train.serve.model_files import PlacedFiles, place_files
from thinpipe.train.worker import train_on_worker

NO_FILES = PlacedFiles({}, {})
SECRET = "patients-of-2026"


def training(**given: Any) -> Job:
    chosen = {"task": "digits", "workers": 3, "threads": 4, **given}
    settings, running = resolve_run(chosen)
    return Job(train_on_worker, settings, (running, None, None))


def over_the_wire(job: Job, placed: PlacedFiles = NO_FILES, threads: int | None = None) -> Job:
    settings, options = json.loads(json.dumps(job.offered()))
    return rebuild(job.verb, settings, options, placed, threads)


def test_a_training_run_is_rebuilt_with_its_settings_and_options() -> None:
    job = training(
        lr=0.3, compress="4bit", steps=7, adam_betas=None, save_every="10", save=Path("run"), evaluate_every=3
    )
    found = over_the_wire(job)
    running: RunOptions = found.arguments[0]
    assert found.settings == job.settings
    assert (running.steps, running.save_every, running.evaluate_every) == (7, 10, 3)
    assert running.save is not None
    assert running.save_local
    assert not running.save.exists()


def test_no_path_and_no_name_of_a_file_leaves_the_client(tmp_path: Path) -> None:
    folder = tmp_path / SECRET
    write_language_model(folder, "some text")
    text = folder / "texts.txt"
    text.write_text("text")
    job = training(task="lm", model=str(folder), data=str(text), tokenizer=str(folder), validation=str(text))
    job = job._replace(
        arguments=(RunOptions(save=folder / "run", export=folder / "out", trace=folder / "t.json"), 0, 0)
    )
    generation = Job(generate_on_worker, GenerationSettings(model=str(folder), adapter=str(folder)), (False,))
    evaluation = Job(evaluate_on_worker, job.settings, (folder / "run", SavedAdapter(folder), "train"))
    for each in (job, generation, evaluation):
        offered = json.dumps(each.offered())
        assert SECRET not in offered
        assert str(tmp_path) not in offered
        assert "texts" not in offered


def test_a_server_has_the_folders_of_its_cache_in_place_of_the_clients(tmp_path: Path) -> None:
    write_language_model(tmp_path / "llama", "some text")
    job = training(task="lm", model=str(tmp_path / "llama"), data=str(tmp_path / "a.txt"))
    cache = ModelCache(tmp_path / "cache", 1 << 30)
    placed = place_files(job.files().manifest(), cache, [], worker=1)
    found = over_the_wire(job, placed)
    placed.close()
    assert str(found.settings.model).startswith(str(tmp_path / "cache"))
    assert found.settings.data is None
    generated = over_the_wire(Job(generate_on_worker, GenerationSettings(model=str(tmp_path / "llama")), ()), placed)
    assert generated.settings.model == found.settings.model


@pytest.mark.parametrize(("client", "owner", "found"), [(4, None, 4), (4, 2, 2), (2, 4, 2), (None, 3, 3)])
def test_a_run_has_at_most_the_threads_that_the_owner_allows(client: Any, owner: Any, found: Any) -> None:
    assert over_the_wire(training(threads=client), threads=owner).settings.threads == found


@pytest.mark.parametrize(
    "change",
    [
        {"task": "tests.train.toy:ToyTask"},
        {"trust_remote_code": True},
        {"layout": "linear", "client_layers": None},
        {"parallel": "data"},
        {"compress_forward": "tests.codecs.helpers:Any"},
        {"model": "/etc"},
        {"epochs": "many"},
        {"lr": -1.0},
        {"unheard_of": 1},
        {"batch_size": None},
    ],
)
def test_settings_that_are_not_a_servers_are_rejected(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_forbidden", ["a server runs no code that the client names"])
    settings, options = training().offered()
    with pytest.raises(ValueError, match=r"\S"):
        rebuild("train", settings | change, options, NO_FILES, None)


@pytest.mark.parametrize(
    ("verb", "change"),
    [
        ("sell", {}),
        ("train", {"save": True, "steps": "all"}),
        ("train", {"activation_cache": "/root"}),
        ("train", {"x": 1}),
    ],
)
def test_options_that_are_not_a_runs_are_rejected(verb: str, change: dict[str, Any]) -> None:
    settings, options = training().offered()
    options |= change
    if "activation_cache" in change:
        assert rebuild(verb, settings, options, NO_FILES, None).arguments[0].activation_cache is None
        return
    with pytest.raises(ValueError, match=r"\S"):
        rebuild(verb, settings, options, NO_FILES, None)


def test_code_that_a_client_names_is_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_forbidden", [])
    imports.forbid_imports("a server runs no code that the client names")
    with pytest.raises(ImportError, match="a server runs no code"):
        imports.import_object("json:dumps")
