"""Evaluation of a model on a worker: as it is, from a run's newest checkpoint, or with adapters."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinpipe.comm.control import ACTIVITY
from thinpipe.options import named
from thinpipe.train.build import check_agreement, prepare, saved_companions
from thinpipe.train.checkpoints.folder import newest_manifest
from thinpipe.train.checkpoints.resume import load_newest
from thinpipe.train.data import check_files, difference, fingerprint, fingerprint_together, read_data, several_read
from thinpipe.train.engines.world import SetupError, World
from thinpipe.train.metrics import Evaluated, evaluate
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import Data, Task
from thinpipe.train.tasks.tasks import task as find_task

Part = Literal["validation", "train"]  # of the data


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The result of an evaluation, and its cost."""

    found: Evaluated
    samples: int
    seconds: float
    wire_bytes: int  # sent by all workers


def check_same_samples(run: Path, data: Data | None) -> None:
    """Raise ValueError unless these are the samples of a run, whose checkpoints have the reference of each."""
    found = None if data is None else difference(newest_manifest(run)[1].data, fingerprint(data))
    if found is not None:
        raise ValueError(f"the reference in {run} is of the pairs that it was trained and validated with: {found}")


def evaluate_on_worker(
    world: World,
    settings: Settings,
    run: Path | None,
    adapter: SavedAdapter | None,
    part: Part,
    task: Task | None = None,  # None: the one that the settings name
) -> EvaluationResult:
    """Evaluate a model as one worker: as it is, from the newest checkpoint of a run, or with adapters.

    The result is valid on the client only, and it alone needs to see the folder of a run.
    """
    # A user's own task may not be importable everywhere.
    task = task or world.together(lambda: find_task(settings.task))
    if world.workers > 1:
        digest = world.together(lambda: None if adapter is None else adapter.digest())
        check_agreement(settings.shared() | {"run": run is not None, "adapter": digest, "part": part}, world)
        check_files(settings, world)
    if task.has_pairs and run is None:
        raise SetupError(named(f"task {task.name} compares a model with that before its training: name a {{run}}"))
    data, facts = read_data(task, settings, world, saved_companions(settings, run), trains=False)
    if task.has_pairs and run is not None:
        world.together(lambda: check_same_samples(run, data))
    if several_read(settings):
        fingerprint_together(data, world)
    engine = prepare(task, settings, RunOptions(), world, facts, {}, adapter).engine
    engine.warm_up()
    if run is not None:
        load_newest(run, engine)
    split = None if data is None else getattr(data, part)
    samples = facts.validation_samples if part == "validation" else facts.train_samples
    world.control.barrier()
    ACTIVITY.note("evaluation")
    began = time.perf_counter()
    found = evaluate(engine, split, samples, settings.batch_size // settings.replicas, task.metric)
    seconds = time.perf_counter() - began
    wire_bytes = sum(world.gather(engine.evaluation_bytes()))
    return EvaluationResult(found=found, samples=samples, seconds=seconds, wire_bytes=wire_bytes)
