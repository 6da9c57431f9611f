"""The registry: every task by name, and light to import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from thinpipe.train.tasks.tasks import TASKS, task

EMBEDDED = """
import sys, torch
from thinpipe.train.models.sequential import units_of
from thinpipe.train.tasks.task import Source
from thinpipe.train.tasks.tasks import task
assert not {"transformers", "sklearn", "PIL"} & set(sys.modules), "imported before a task needs it"
for name in ("digits", "grammar"):
    data, shape = task(name).load(Source())
    model = task(name).build(shape, Source())
    assert len(units_of(model)) == task(name).preflight(Source()), name
assert "datasets" not in sys.modules, "embedded tasks need no data sets"
"""


def test_every_task_of_the_documentation_is_there() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()
    assert set(TASKS) == set(re.findall(r"^\| `([a-z0-9-]+)` \|", page.partition("## Defaults")[0], re.MULTILINE))
    assert all(task(name).name == name for name in TASKS)


def test_an_unknown_task_is_answered_with_a_list() -> None:
    with pytest.raises(ValueError, match=r"'digit'(.|\n)*digits +scikit-learn(.|\n)*texts +your own"):
        task("digit")


OWN = """
from thinpipe.train.tasks.digits import Digits
from thinpipe.train.tasks.task import Task

number = 3
made = Digits()

class Good(Digits):
    name = "good"

class Unrelated:
    pass

class WithoutLoad(Task):
    name = "without"

class Raises(Digits):
    def __init__(self):
        raise RuntimeError("no licence")

class WithoutDefaults(Digits):
    defaults = None

class OtherMetric(Digits):
    metric = "f1"
"""


@pytest.fixture
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks_of_a_user.py").write_text(OWN)
    (tmp_path / "broken_task.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)  # where a user's modules are found
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("_own")
def test_a_class_of_a_user_is_a_task_and_made_once() -> None:
    made = task("tasks_of_a_user:Good")
    assert (made.name, made.metric) == ("good", "accuracy")
    assert task("tasks_of_a_user:Good") is made


@pytest.mark.usefixtures("_own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Good", "'nowhere:Good' cannot be imported: No module named 'nowhere'"),
        ("tasks_of_a_user:Bad", "'tasks_of_a_user:Bad' cannot be imported: .* has no attribute 'Bad'"),
        ("broken_task:Good", "cannot be imported: ZeroDivisionError: division by zero"),
        ("tasks_of_a_user:number", "names a subclass of thinpipe.train.tasks.task.Task; 'tasks_of_a_user:number' is 3"),
        ("tasks_of_a_user:made", "names a subclass .* is <.*Digits object"),
        ("tasks_of_a_user:Unrelated", "names a subclass .* is the class Unrelated"),
        (
            "tasks_of_a_user:WithoutLoad",
            "made without arguments; .* raised TypeError: .* abstract .* build, load",
        ),
        ("tasks_of_a_user:Raises", "made without arguments; tasks_of_a_user:Raises raised RuntimeError: no licence"),
        ("tasks_of_a_user:WithoutDefaults", "needs class attributes name, summary, metric, defaults; .*: defaults"),
        ("tasks_of_a_user:OtherMetric", "metric of .* is one of accuracy, matthews, perplexity; got 'f1'"),
    ],
)
def test_an_invalid_task_of_a_user_is_an_error_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(name)


@pytest.mark.parametrize("name", TASKS)
def test_the_chunks_of_a_recipe_divide_its_batch(name: str) -> None:
    recipe = task(name).defaults
    assert recipe.batch_size % recipe.chunks == 0


def test_embedded_tasks_import_no_data_library() -> None:
    subprocess.run([sys.executable, "-c", EMBEDDED], check=True, timeout=120)
