"""What cannot be trained, found out before there are workers: what is missing, more stages than units."""

from __future__ import annotations

from thinpipe.pipeline.partition import choose_cuts
from thinpipe.training.settings import Settings
from thinpipe.workloads.task import Task


def check_possible(task: Task, settings: Settings) -> None:
    """ValueError for what can be told without reading samples or building the model."""
    units = task.look_for(settings.source)
    if units is not None and settings.parallel == "pipeline":
        choose_cuts(units, settings.workers, settings.layout, client_layers=settings.client_layers)
