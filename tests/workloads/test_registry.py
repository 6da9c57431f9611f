"""The registry: every task by name, and light to import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from thinpipe.workloads.tasks import TASKS, task

EMBEDDED = """
import sys, torch
from thinpipe.pipeline.units import units_of
from thinpipe.workloads.task import Source
from thinpipe.workloads.tasks import task
assert not {"transformers", "sklearn", "PIL"} & set(sys.modules), "imported before a task needs it"
for name in ("digits", "grammar"):
    data, shape = task(name).load(Source())
    model = task(name).build(shape, Source())
    assert len(units_of(model)) == task(name).look_for(Source()), name
assert "datasets" not in sys.modules, "embedded tasks need no data sets"
"""


def test_every_task_of_the_documentation_is_there() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    assert set(TASKS) == set(re.findall(r"^\| `([a-z0-9-]+)` \|", page.partition("## Defaults")[0], re.MULTILINE))
    assert all(task(name).name == name for name in TASKS)


def test_an_unknown_task_is_answered_with_a_list() -> None:
    with pytest.raises(ValueError, match=r"'digit'(.|\n)*digits +scikit-learn(.|\n)*texts +your own"):
        task("digit")


@pytest.mark.parametrize("name", TASKS)
def test_the_chunks_of_a_recipe_divide_its_batch(name: str) -> None:
    recipe = task(name).recipe
    assert recipe.batch_size % recipe.chunks == 0


def test_embedded_tasks_import_no_data_library() -> None:
    subprocess.run([sys.executable, "-c", EMBEDDED], check=True, timeout=120)
