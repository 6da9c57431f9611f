"""Modules of a task: imported by the server that forks workers, once for all of them."""

import importlib
import os

from thinpipe.train.tasks.tasks import TASKS

_task = TASKS.get(os.environ.pop("THINPIPE_TASK", ""))
for _module in _task.modules if _task else ():
    importlib.import_module(_module)
