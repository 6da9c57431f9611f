"""Modules preloaded for the workers of a verb, guessed from its arguments."""

import importlib
import os
import runpy

import pytest

from thinpipe.cli import app as cli
from thinpipe.train.tasks import preload
from thinpipe.train.tasks.tasks import TASKS

CPU = "thinpipe.codecs.kernels.cpu"
TRAINING, TASK = "thinpipe.train.worker", "thinpipe.train.tasks.preload"
EVALUATION, GENERATION = "thinpipe.train.evaluation", "thinpipe.train.generation.printing"


@pytest.mark.parametrize(
    ("command", "modules", "task"),
    [
        ("train", (TRAINING, CPU, TASK), "digits"),
        ("train --epochs 1 --task grammar", (TRAINING, CPU, TASK), "grammar"),
        ("train --task=grammar", (TRAINING, CPU, TASK), "grammar"),
        ("train --model folder --lora 8", (TRAINING, CPU, "peft", "transformers"), None),
        ("train --resume runs/a", (TRAINING, CPU), None),
        ("evaluate --run runs/a", (EVALUATION, CPU, "transformers"), None),
        ("generate --adapter folder", (GENERATION, CPU, "peft", "transformers"), None),
    ],
)
def test_workers_find_their_modules_imported(
    command: str, modules: tuple[str, ...], task: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(cli, "import_ahead", lambda *modules, **told: asked.append((modules, told)))
    verb, *arguments = command.split()
    cli.start_server(verb, arguments)
    assert asked == [(modules, {} if task is None else {"THINPIPE_TASK": task})]


@pytest.mark.parametrize(
    "command",
    ["train --help", "train --help-all", "train --rank 1 --master a:1", "train --rank=1", "diff a b", "models"],
)
def test_nothing_is_preloaded_without_workers(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "import_ahead", None)
    verb, *arguments = command.split()
    cli.start_server(verb, arguments)


def test_nothing_is_preloaded_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "import_ahead", None)
    monkeypatch.setenv("RANK", "0")
    cli.start_server("train", [])


def test_the_server_imports_the_modules_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    monkeypatch.setenv("THINPIPE_TASK", "digits")
    runpy.run_path(preload.__file__)
    assert tuple(imported) == TASKS["digits"].modules != ()
    assert "THINPIPE_TASK" not in os.environ  # workers are of any task
