"""The registry: every task by its name."""

from __future__ import annotations

from thinpipe.options import OptionError
from thinpipe.workloads.chat import Chat
from thinpipe.workloads.digits import Digits
from thinpipe.workloads.fashion import FASHION_MNIST
from thinpipe.workloads.folders import ImageFolders
from thinpipe.workloads.grammar import Grammar
from thinpipe.workloads.lm import LanguageModel
from thinpipe.workloads.tables import TextTable
from thinpipe.workloads.task import Task
from thinpipe.workloads.text import COLA, RTE
from thinpipe.workloads.vision import CIFAR10, CIFAR100, FOOD101

_ALL: tuple[Task, ...] = (
    *(Digits(), Grammar()),
    *(FASHION_MNIST, CIFAR10, CIFAR100, FOOD101),
    *(RTE, COLA),
    *(ImageFolders(), TextTable(), LanguageModel(), Chat()),
)
TASKS: dict[str, Task] = {each.name: each for each in _ALL}


def task(name: str) -> Task:
    """The task of this name; ValueError with a list of all if there is none."""
    if name not in TASKS:
        lines = "".join(f"\n  {each.name:13} {each.summary}" for each in TASKS.values())
        raise OptionError(f"there is no task {name!r}; the tasks are:{lines}")
    return TASKS[name]
