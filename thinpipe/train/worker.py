"""Execution on a worker: of any command, with its errors as an outcome; and of a training run, from data to export."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinpipe.comm.errors import Interrupted, LinkError, StoppedTogether, WorkerError, ended_by, is_secondary
from thinpipe.comm.signals import noted_signals
from thinpipe.options import flags_in_errors, named
from thinpipe.system.files import OutputError
from thinpipe.train.batches import Samples
from thinpipe.train.build import check_agreement, prepare, saved_companions
from thinpipe.train.checkpoints.folder import FolderLock, check_save_folder, check_shared, checkpoints, sweep
from thinpipe.train.checkpoints.manifest import Progress, SaveOptions
from thinpipe.train.checkpoints.resume import Resumed, adopt_client_settings, first_units, resume
from thinpipe.train.checkpoints.saving import Saver, UnsavedError
from thinpipe.train.checkpoints.state import frozen_hash, seed_worker, state_bytes
from thinpipe.train.data import Facts, check_files, check_objective, fingerprint_together, read_data, several_read
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.finite import NotFiniteError
from thinpipe.train.engines.world import SetupError, World, join_world
from thinpipe.train.events import Finished, Listener, Plan
from thinpipe.train.export import Exporter
from thinpipe.train.loop import Loop
from thinpipe.train.metrics import keep_reference
from thinpipe.train.optimize import OPTIMIZER_OPTIONS, make_optimizer
from thinpipe.train.preflight import check_space
from thinpipe.train.recovery.keeper import Keeper
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import DataError, Task
from thinpipe.train.watchers import make_watchers

GPU_TOKENS = 8000  # of a microbatch: a step of a Llama of 222 M takes about as long with 2,000 on an H200

Main = Callable[..., Any]  # called with the world, the settings and further arguments


@dataclass(frozen=True)
class Outcome:
    """How a command ended on a worker: the exit code, and a message for the user or the result."""

    code: int = 0
    message: str = ""
    result: Any = None


def run_on_worker(main: Main, settings: Any, *args: Any) -> Outcome:
    """Join the world and return the outcome of ``main(world, settings, *args)``; the function that workers run.

    An error that all workers raise together is an outcome; one of this worker alone is raised and ends the others.
    """
    with flags_in_errors():
        world = join_world(settings.devices, threads=settings.threads)
        try:
            return Outcome(result=main(world, settings, *args))
        except SetupError as error:
            return Outcome(2, str(error))
        except DataError as error:
            raise WorkerError(str(error), code=2) from None
        except (NotFiniteError, OutputError, UnsavedError) as error:
            return Outcome(1, str(error))
        except StoppedTogether as error:
            who = "" if error.worker is None else f"worker {error.worker} was "
            return Outcome(128 + error.number, who + ended_by(error.number))


def train_on_worker(
    world: World,
    settings: Settings,
    running: RunOptions,
    make_listener: Callable[[], Listener],
    find_task: Callable[[str], Task],
    keeper: Keeper | None = None,
) -> None:
    """Train as a worker that ``thinpipe train`` has started."""
    # torch prints its schedule when a stage raises; the error alone is more useful.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    settings, running = adopt_client_settings(settings, running, world)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    task = world.together(lambda: find_task(settings.task))  # a user's own may not be importable everywhere
    train(task, settings, running, world, make_listener, keeper)


def train(
    task: Task,
    settings: Settings,
    running: RunOptions,
    world: World,
    make_listener: Callable[[], Listener],
    keeper: Keeper | None = None,
) -> Finished:
    """Train as one worker of a run; the result is valid on the client only, which calls ``make_listener``.

    ``keeper``: what this process keeps if a lost server does not end the run.
    """
    if world.workers > 1:
        check_agreement(settings.shared() | running.shared(), world)
        check_files(settings, world)
    world.together(lambda: check_objective(task, settings))
    lock = world.together(lambda: _take_folder(running, world, keeper))
    try:
        if running.save is not None and world.workers > 1 and not running.save_local:
            save = running.save
            world.together(lambda: check_shared(save, world))
        notices = [] if lock is None or lock.notice is None else [lock.notice]
        return _train(task, settings, running, world, make_listener, notices, keeper)
    finally:
        if lock is not None and keeper is None:
            lock.release()


def _take_folder(running: RunOptions, world: World, keeper: Keeper | None) -> FolderLock | None:
    """Lock the checkpoint folder on the client, and remove leftovers of interrupted runs; return None elsewhere."""
    if running.save is None or not world.is_client:
        return None
    if keeper is not None and keeper.lock is not None:
        return keeper.lock
    lock = FolderLock(running.save)
    try:
        check_save_folder(running.save, running.resume)
        if lock.is_held:
            sweep(running.save)
    except BaseException:
        lock.release()
        raise
    if keeper is not None:
        keeper.lock = lock
    return lock


def _train(
    task: Task,
    settings: Settings,
    running: RunOptions,
    world: World,
    make_listener: Callable[[], Listener],
    notices: list[str],
    keeper: Keeper | None,
) -> Finished:
    loaded = None if keeper is None else keeper.loaded
    data, facts = read_data(task, settings, world, saved_companions(settings, running.resume), loaded=loaded)
    kept_or_shared = running.save is not None or running.resume is not None or several_read(settings)
    fingerprint = fingerprint_together(data, world) if kept_or_shared else {}
    kept = {} if data is None else data.companions
    engine, exporter, about = prepare(task, settings, running, world, facts, kept, keeper=keeper)
    settings = replace(settings, schedule=engine.order or settings.schedule)  # a resumed run keeps it over any links
    if (running.save is not None or running.resume is not None) and (frozen := frozen_hash(engine)) is not None:
        about["frozen"] = frozen
    notices = [*notices, *(data.notices if data else ()), *(exporter.notices if exporter else ()), *engine.notices]
    notices += small_chunk_notices(settings, facts.shape.tokens)
    engine.warm_up()
    optimizer = make_optimizer(engine.parameters(), **{name: getattr(settings, name) for name in OPTIMIZER_OPTIONS})
    seed_worker(settings.seed, world.worker)
    restores = keeper is not None and keeper.base is not None
    if task.has_pairs and not (restores or running.resume):
        size = settings.batch_size // settings.replicas
        keep_reference(engine, data, (facts.train_samples, facts.validation_samples), size)
    steps = facts.train_samples // settings.step_samples * settings.epochs
    resumed = Resumed(progress=Progress(steps=steps, metric_name=task.metric), notices=[])
    if keeper is not None and restores:
        resumed = world.together(partial(keeper.restore, engine, optimizer))
    elif running.resume is not None:
        frozen = about.get("frozen")
        resumed = world.together(lambda: resume(running, settings, engine, optimizer, fingerprint, frozen))
    progress, notices = resumed.progress, notices + resumed.notices
    plan = _plan(task, settings, running, facts, engine, progress)
    ends = {"first_step": plan.first_step, "last_step": plan.last_step}
    watchers = world.together(lambda: make_watchers(running, settings, engine, **ends))
    expected_bytes = world.gather(state_bytes(engine, settings))
    captured_bytes = sum(each.file_bytes for each in watchers)
    world.together(lambda: _check_space(running, sum(expected_bytes), captured_bytes, exporter, world.is_client))
    loop = Loop(
        engine,
        optimizer,
        progress,
        settings,
        plan,
        samples=Samples.of(data, facts.train_samples, settings, engine.shares),
        saver=_saver(running, settings, engine, fingerprint | about, expected_bytes, kept),
        watchers=watchers,
    )
    if keeper is not None:
        loop.keeper, make_listener = keeper, keeper.begin(engine, (data, facts), make_listener, expected_bytes)
        notices = [] if restores else [*notices, keeper.notice(running.mirror_every)]
    end, unexported = _run(loop, plan, exporter, make_listener() if world.is_client else None, notices)
    _check_kept(running, loop.unsaved, unexported)
    return end


def _check_space(
    running: RunOptions, state_bytes: int, captured_bytes: int, exporter: Exporter | None, is_client: bool
) -> None:
    """Raise OptionError on the client if a file of the run does not fit on its disk."""
    sizes = {
        "save": _save_bytes(running, state_bytes),
        "capture": 2 * captured_bytes,  # a new file is complete before the old one goes
        "export": 0 if exporter is None else exporter.bytes,
    }
    if is_client:
        check_space(_written(running), sizes)


def small_chunk_notices(settings: Settings, tokens: int | None) -> list[str]:
    """Return a line for the user if microbatches are too small for a GPU."""
    here = settings.chunk_size * (tokens or 0)
    if not 0 < here < GPU_TOKENS or "cuda" not in settings.devices or settings.compile:
        return []
    remedies = "a larger {batch_size}, or {compile}"
    return [
        named(
            f"a microbatch has {settings.chunk_size} x {tokens} = {here:,} tokens, and below about {GPU_TOKENS:,} a "
            f"GPU waits for the launches of kernels: take {'fewer {chunks}, ' * (settings.chunks > 1)}{remedies}"
        )
    ]


def _check_kept(running: RunOptions, unsaved: str | None, unexported: str | None) -> None:
    """Raise UnsavedError, with the reason, if the last checkpoint or the export of a finished run is not on disk."""
    if unsaved is not None:
        raise UnsavedError(f"the run came to its end, but its last checkpoint could not be saved: {unsaved}")
    if unexported is not None:
        rescue = "nothing of it is left, give {save} too the next time"
        if running.save is not None:
            rescue = f"its last checkpoint has the model: thinpipe export {running.save} {running.export}"
        raise UnsavedError(named(f"the run came to its end, but its model was not exported: {unexported}; {rescue}"))


def _run(
    loop: Loop, plan: Plan, exporter: Exporter | None, listener: Listener | None, notices: list[str]
) -> tuple[Finished, str | None]:
    """Run the loop with the calls to the client's listener; return its result, and why the export failed, if so."""
    try:
        if listener is not None:
            for line in notices:
                listener.noticed(line)
            listener.planned(plan)
        if loop.keeper is not None:
            loop.keeper.ready(loop.engine.world)
        with noted_signals() as interrupted:
            try:
                end = loop.run(listener, interrupted)
            except LinkError:
                if interrupted.number and loop.keeper is not None and loop.engine.world.is_client:
                    raise Interrupted(interrupted.number) from None  # no further attempt
                raise
        problem = None if exporter is None else exporter.export(loop.progress)
        if exporter is not None and problem is None:
            end = replace(end, exported=exporter.path)
        if listener is not None:
            listener.finished(end)
        return end, problem
    except BaseException as error:
        if listener is not None and not (loop.keeper is not None and is_secondary(error)):
            listener.failed(error)
        raise


def _written(running: RunOptions) -> dict[str, Path | None]:
    """Return the outputs whose sizes are known only once the model is built."""
    capture = None if running.capture is None else running.capture.path
    return {"save": running.save, "capture": capture, "export": running.export}


def _save_bytes(running: RunOptions, size: int) -> int:
    """Return the additional bytes for checkpoints of a size; a new one is complete before the oldest is deleted."""
    if running.save is None:
        return 0
    return size * max(1, running.keep + running.keep_best + 1 - len(checkpoints(running.save)))


def _saver(
    running: RunOptions,
    settings: Settings,
    engine: Engine,
    samples: dict[str, Any],
    expected_bytes: list[int],
    companions: Mapping[str, bytes],
) -> Saver | None:
    if running.save is None:
        return None
    return Saver(
        running.save,
        engine.world,
        settings=settings,
        options=SaveOptions(**{each.name: getattr(running, each.name) for each in fields(SaveOptions)}),
        first_units=first_units(engine),
        data=samples,
        expected_bytes=expected_bytes,
        companions=companions,
    )


def _plan(
    task: Task, settings: Settings, running: RunOptions, facts: Facts, engine: Engine, progress: Progress
) -> Plan:
    holdings = engine.holdings
    same = ("parallel", "workers", "chunks", "batch_size", "epochs", "accumulate")
    return Plan(
        task=task.name,
        metric=task.metric,
        **{name: getattr(settings, name) for name in same},
        steps_per_epoch=progress.steps // settings.epochs,
        first_step=progress.step,
        last_step=running.last_step(progress.steps),
        evaluate_every=running.evaluate_every,
        train_samples=facts.train_samples,
        validation_samples=facts.validation_samples,
        parameters=sum({holding.stage: holding.parameters for holding in holdings}.values()),
        trained=sum({holding.stage: holding.trained for holding in holdings}.values()),
        holdings=holdings,
        links=engine.link_plans(),
        tokens=None if facts.shape.tokens is None else facts.inputs[0].shape[1],  # chats are padded to their longest
        schedule=engine.order,
    )
