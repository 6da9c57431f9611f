"""Imports of a task's modules in the server that forks workers, so that all workers share them."""

import importlib
import os

from thinpipe.train.tasks.tasks import TASKS

_task = TASKS.get(os.environ.pop("THINPIPE_TASK", ""))
for _module in _task.modules if _task else ():
    importlib.import_module(_module)
