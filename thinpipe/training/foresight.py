"""What cannot be trained, found out before there are workers: what is missing, too large, more stages than units."""

from __future__ import annotations

from thinpipe.measure.memory import check_fits
from thinpipe.pipeline.partition import choose_cuts
from thinpipe.training.settings import Settings
from thinpipe.workloads.task import Task

_IMAGE = 3 * 4  # bytes of a pixel: three colours, floats


def check_possible(task: Task, settings: Settings) -> None:
    """ValueError for what can be told without reading samples or building the model."""
    source = settings.source
    units = task.look_for(source)
    if source.width is not None:
        what = f"{{width}} {source.width:g}: the model, which each of {settings.workers} workers builds,"
        check_fits(what, settings.workers * task.weight_bytes(source), "take a smaller one")
    if source.image_size is not None:
        size, batch = source.image_size, settings.batch_size
        check_fits(
            f"{{image_size}} {size}: a batch of {batch}", batch * _IMAGE * size**2, "take smaller ones, or fewer"
        )
    if units is not None and settings.parallel == "pipeline":
        choose_cuts(units, settings.workers, settings.layout, client_layers=settings.client_layers)
