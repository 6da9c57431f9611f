"""The registry of tasks: built-in ones by name, and users' tasks by package.module:Class."""

from __future__ import annotations

from functools import cache

from thinpipe.options import OptionError, nearest
from thinpipe.train.models.function import error_text, import_object, is_function_name
from thinpipe.train.tasks.chat import Chat
from thinpipe.train.tasks.digits import Digits
from thinpipe.train.tasks.fashion import FASHION_MNIST
from thinpipe.train.tasks.folders import ImageFolders
from thinpipe.train.tasks.grammar import Grammar
from thinpipe.train.tasks.lm import LanguageModel
from thinpipe.train.tasks.preference import Preference
from thinpipe.train.tasks.tables import TextTable
from thinpipe.train.tasks.task import METRICS, Task, TaskDefaults
from thinpipe.train.tasks.text import COLA, RTE
from thinpipe.train.tasks.vision import CIFAR10, CIFAR100, FOOD101

_ALL: tuple[Task, ...] = (
    *(Digits(), Grammar()),
    *(FASHION_MNIST, CIFAR10, CIFAR100, FOOD101),
    *(RTE, COLA),
    *(ImageFolders(), TextTable(), LanguageModel(), Chat(), Preference()),
)
TASKS: dict[str, Task] = {each.name: each for each in _ALL}


def task(name: str) -> Task:
    """Return the task of this name, or one of the class that package.module:Class names; OptionError if none exists."""
    if is_function_name(name):
        return _own_task(name)
    if name not in TASKS:
        lines = "".join(f"\n  {each.name:13} {each.summary}" for each in TASKS.values())
        near = nearest(name, TASKS)
        raise OptionError(f"there is no task {name!r}{near}; give package.module:Class, or one of:{lines}")
    return TASKS[name]


@cache
def _own_task(name: str) -> Task:
    """Import a user's class and return an instance; raise OptionError unless it is a task."""
    rule = "{task} package.module:Class names a subclass of thinpipe.train.tasks.task.Task"
    kind = import_object(name, rule)
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise OptionError(
            f"{rule}; {name!r} is {f'the class {kind.__name__}' if isinstance(kind, type) else repr(kind)}"
        )
    try:
        made = kind()
    except Exception as error:  # the user's constructor may raise anything, or a method is missing
        raise OptionError(f"{rule} that is made without arguments; {name} raised {error_text(error)}") from None
    attributes = {"name": str, "summary": str, "metric": str, "defaults": TaskDefaults}
    wrong = [each for each, type_ in attributes.items() if not isinstance(getattr(made, each, None), type_)]
    if wrong:
        raise OptionError(
            f"{name} needs class attributes {', '.join(attributes)}; missing or of another type: {wrong[0]}"
        )
    if made.metric not in METRICS:
        raise OptionError(f"the metric of {name} is one of {', '.join(METRICS)}; got {made.metric!r}")
    return made
