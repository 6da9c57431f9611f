"""Experiment trackers, through those of accelerate: TensorBoard, wandb and trackio.

A tracker's own environment variables apply, such as WANDB_MODE=offline, WANDB_RUN_ID and TRACKIO_DIR. Names of
accelerate used here, seen on 1.15: ``tracking.LOGGER_TYPE_TO_CLASS``, and ``PartialState``, which its trackers need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from thinpipe.options import OptionError, nearest
from thinpipe.system.files import OutputError
from thinpipe.system.sanitize import first_line
from thinpipe.train.events import Finished, Plan
from thinpipe.train.listeners import ScalarListener

TRACKERS = ("tensorboard", "wandb", "trackio")
FOLDER = "runs"  # of TensorBoard's tracker, below the working directory, as in transformers and torch
_PROJECT = "thinpipe"  # unless WANDB_PROJECT or TRACKIO_PROJECT names another


def parse_trackers(text: str) -> tuple[str, ...]:
    """Return the names in a list; raise OptionError for an unknown one."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in TRACKERS:
            raise OptionError(
                f"{{report_to}} is a list of {', '.join(TRACKERS)}; got {name!r}{nearest(name, TRACKERS)}"
            )
    return names


def check_installed(names: Sequence[str]) -> None:
    """Raise OptionError unless the packages of all trackers are installed."""
    for name in ("accelerate", *names) if names else ():
        if find_spec(name) is None:
            raise OptionError(f"{{report_to}} needs the package {name}, which is not installed: pip install {name}")


class Trackers(ScalarListener):
    """Sends the numbers of a run to trackers, with its settings as the configuration of the experiment."""

    def __init__(self, names: Sequence[str], config: Mapping[str, Any]) -> None:
        self._names, self._config = names, config
        self._trackers: list[Any] = []

    def planned(self, plan: Plan) -> None:
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        self.metric = plan.metric
        threads = torch.get_num_threads()
        PartialState(cpu=True)
        torch.set_num_threads(threads)  # which it changes under torchrun
        # Numbers, switches and texts, which all trackers take.
        config = {
            name: each if isinstance(each, bool | int | float) else str(each) for name, each in self._config.items()
        }
        for name in self._names:
            project = os.environ.get(f"{name.upper()}_PROJECT", _PROJECT)
            kind = LOGGER_TYPE_TO_CLASS[name]
            with _problems(name):
                tracker = kind(project, FOLDER) if kind.requires_logging_directory else kind(project)
                if hasattr(tracker, "start"):
                    tracker.start()
                self._trackers.append(tracker)
                tracker.store_init_configuration(config)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            with _problems(tracker.name):
                tracker.log(dict(values), step=step)

    def finished(self, end: Finished) -> None:
        while self._trackers:
            tracker = self._trackers.pop()
            with _problems(tracker.name):
                tracker.finish()

    def failed(self, error: BaseException) -> None:
        for tracker in self._trackers:
            tracker.finish()
        self._trackers = []


@contextmanager
def _problems(name: str) -> Iterator[None]:
    """Convert any error of a tracker, such as a missing login or network, into an OutputError."""
    try:
        yield
    except Exception as error:
        raise OutputError(f"the tracker {name} fails: {first_line(error)}") from None
