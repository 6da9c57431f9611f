"""The registry: every task by its name."""

from __future__ import annotations

from thinpipe.workloads.digits import Digits
from thinpipe.workloads.grammar_task import Grammar
from thinpipe.workloads.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (Digits(), Grammar())}


def task(name: str) -> Task:
    """The task of this name; ValueError with a list of all if there is none."""
    if name not in TASKS:
        lines = "".join(f"\n  {each.name:9} {each.summary}" for each in TASKS.values())
        raise ValueError(f"there is no task {name!r}; the tasks are:{lines}")
    return TASKS[name]
