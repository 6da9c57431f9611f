"""The main function of every worker of a run: read the data or receive its shape, build the model, cut it, train."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from thinpipe.comm.backend import CPU
from thinpipe.comm.control import ACTIVITY
from thinpipe.comm.exchange import DisagreementError, agree
from thinpipe.comm.membership import say_remote
from thinpipe.comm.signals import noted_signals
from thinpipe.options import named
from thinpipe.train.batches import Samples
from thinpipe.train.checkpoints.folder import (
    FolderLock,
    check_save_folder,
    check_shared,
    checkpoints,
    companions_of,
    sweep,
)
from thinpipe.train.checkpoints.manifest import Progress, SaveOptions
from thinpipe.train.checkpoints.resume import Resumed, first_units, load_newest, resume
from thinpipe.train.checkpoints.saving import Saver, UnsavedError
from thinpipe.train.checkpoints.state import frozen_hash, seed_worker, state_bytes
from thinpipe.train.data import Facts, check_files, fingerprint_together, read_data, several_read
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.plan import describe_held
from thinpipe.train.engines.replica import ReplicaEngine
from thinpipe.train.engines.units import Meta, cut_model
from thinpipe.train.engines.world import SetupError, World
from thinpipe.train.evaluate import Evaluated, evaluate
from thinpipe.train.events import Finished, Listener, Plan
from thinpipe.train.export import Export, Exporter
from thinpipe.train.loop import Loop
from thinpipe.train.models.adapters import Adapted, adapt
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.optimize import make_optimizer
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import Task
from thinpipe.train.watchers import make_watchers
from thinpipe.version import __version__

Part = Literal["validation", "train"]  # of the data
CheckRoom = Callable[[Mapping[str, int]], None]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The result of an evaluation, and its cost."""

    found: Evaluated
    samples: int
    seconds: float
    wire_bytes: int  # sent by all workers


def train(
    task: Task,
    settings: Settings,
    running: RunOptions,
    world: World,
    make_listener: Callable[[], Listener],
    check_room: CheckRoom = lambda sizes: None,
) -> Finished:
    """Train as one worker of a run; the result is valid on the client only.

    ``make_listener`` is called on the client. So is ``check_room``, with the bytes that ``save``, ``capture`` and
    ``export`` need.
    """
    if world.workers > 1:
        _agree(_must_agree(settings, running), world)
        check_files(settings, world)
    lock = world.together(lambda: _take_folder(running, world))
    try:
        if running.save is not None and world.workers > 1 and not running.save_local:
            save = running.save
            world.together(lambda: check_shared(save, world))
        notices = [] if lock is None or lock.notice is None else [lock.notice]
        return _train(task, settings, running, world, make_listener, check_room, notices)
    finally:
        if lock is not None:
            lock.release()


def _take_folder(running: RunOptions, world: World) -> FolderLock | None:
    """Lock the checkpoint folder on the client, and remove leftovers of interrupted runs; return None elsewhere."""
    if running.save is None or not world.is_client:
        return None
    lock = FolderLock(running.save)
    try:
        check_save_folder(running.save, running.resume)
        if lock.is_held:
            sweep(running.save)
    except BaseException:
        lock.release()
        raise
    return lock


def _train(
    task: Task,
    settings: Settings,
    running: RunOptions,
    world: World,
    make_listener: Callable[[], Listener],
    check_room: CheckRoom,
    notices: list[str],
) -> Finished:
    data, facts = read_data(task, settings, world, companions=_companions(settings, running.resume))
    kept_or_shared = running.save is not None or running.resume is not None or several_read(settings)
    fingerprint = fingerprint_together(data, world) if kept_or_shared else {}
    kept = {} if data is None else data.companions
    engine, exporter, about = _prepare(task, settings, running, world, facts, kept)
    settings = replace(settings, schedule=engine.order or settings.schedule)  # a resumed run keeps it over any links
    if running.save is not None or running.resume is not None:
        frozen = frozen_hash(engine)
        about |= {} if frozen is None else {"frozen": frozen}
    notices = [*notices, *(data.notices if data is not None else ()), *(exporter.notices if exporter else ())]
    engine.warm_up()
    optimizer = make_optimizer(
        engine.parameters(),
        name=settings.optimizer,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
        adam_betas=settings.adam_betas,
    )
    seed_worker(settings.seed, world.worker)
    steps = facts.train_samples // settings.step_samples * settings.epochs
    progress = Progress(steps=steps, metric_name=task.metric)
    if running.resume is not None:
        resumed: Resumed = world.together(
            lambda: resume(running, settings, engine, optimizer, fingerprint, about.get("frozen"))
        )
        progress, notices = resumed.progress, notices + resumed.notices
    plan = _plan(task, settings, running, facts, engine, progress)
    first, last = plan.first_step, plan.last_step
    watchers = world.together(lambda: make_watchers(running, settings, engine, first_step=first, last_step=last))
    expected_bytes = world.gather(state_bytes(engine, settings))
    sizes = {
        "save": _save_bytes(running, sum(expected_bytes)),
        "capture": 2 * sum(each.file_bytes for each in watchers),  # a new file is complete before the old one goes
        "export": 0 if exporter is None else exporter.bytes,
    }
    world.together(lambda: check_room(sizes) if world.is_client else None)
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
    end, unexported = _run(loop, plan, exporter, make_listener() if world.is_client else None, notices)
    _check_kept(running, loop.unsaved, unexported)
    return end


def evaluate_model(
    task: Task, settings: Settings, world: World, *, run: Path | None, adapter: SavedAdapter | None = None, part: Part
) -> EvaluationResult:
    """Evaluate a model as one worker: as it is, from the newest checkpoint of a run, or with adapters.

    The result is valid on the client only. The folder of a run must be visible to all workers.
    """
    if world.workers > 1:
        digest = world.together(lambda: None if adapter is None else adapter.digest())
        _agree(settings.shared() | {"run": run is not None, "adapter": digest, "part": part}, world)
        check_files(settings, world)
    data, facts = read_data(task, settings, world, _companions(settings, run), trains=False)
    if several_read(settings):
        fingerprint_together(data, world)
    engine, _, _ = _prepare(task, settings, RunOptions(), world, facts, {}, adapter)
    engine.warm_up()
    if run is not None:
        load_newest(run, engine)
    split = None if data is None else getattr(data, part)
    samples = facts.validation_samples if part == "validation" else facts.train_samples
    world.barrier()
    ACTIVITY.note("evaluation")
    began = time.perf_counter()
    found = evaluate(engine, split, samples, settings.batch_size // settings.replicas, task.metric)
    seconds = time.perf_counter() - began
    wire_bytes = sum(world.gather(engine.evaluation_bytes()))
    return EvaluationResult(found=found, samples=samples, seconds=seconds, wire_bytes=wire_bytes)


def _agree(facts: Mapping[str, Any], world: World) -> None:
    versions = {"torch version": torch.__version__, "thinpipe version": __version__}
    try:
        agree({**facts, **versions}, world.control_group, CPU)
    except DisagreementError as error:
        raise SetupError(str(error)) from None


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
        with noted_signals() as interrupted:
            end = loop.run(listener, interrupted)
        problem = None if exporter is None else exporter.export(loop.progress)
        if exporter is not None and problem is None:
            end = replace(end, exported=exporter.path)
        if listener is not None:
            listener.finished(end)
        return end, problem
    except BaseException as error:
        if listener is not None:
            listener.failed(error)
        raise


def _must_agree(settings: Settings, running: RunOptions) -> dict[str, Any]:
    """Return the options that must be the same on all workers: each one that affects a collective."""
    capture = running.capture
    return settings.shared() | {
        # True if there are such files; their paths may differ between machines.
        **{name: getattr(running, name) is not None for name in ("save", "resume", "trace", "capture", "export")},
        **{name: getattr(running, name) for name in ("save_local", "save_every", "keep", "steps", "evaluate_every")},
        **{name: getattr(running, name) for name in ("patience_s", "merge", "memory_limit")},
        "captured": None if capture is None else [capture.steps, capture.chunks, capture.limit],
    }


def _prepare(
    task: Task,
    settings: Settings,
    running: RunOptions,
    world: World,
    facts: Facts,
    kept: Mapping[str, bytes],
    adapter: SavedAdapter | None = None,
) -> tuple[Engine, Exporter | None, dict[str, Any]]:
    """Return this worker's part of the model, its exporter, and the facts to rebuild the model from.

    The full model is released on return: it need not fit in a worker's memory.
    """

    def build() -> nn.Module:
        torch.manual_seed(settings.seed)  # the same weights on all workers, for all parallelism
        return task.build(facts.shape, settings.source)

    def export() -> Export | None:
        if running.export is None or not world.is_client:
            return None
        return Export.of(running.export, model, task, settings, kept)

    model = world.together(build)
    about = {"shape": asdict(facts.shape), "tensors": len(model.state_dict())}
    exported = world.together(export)  # from the model as it was built: cutting it changes its config
    adapted = world.together(
        lambda: (
            adapt(model, settings.adapters, settings.freeze, settings.seed)
            if adapter is None
            else adapter.put_on(model)
        )
    )
    engine = _make_engine(adapted, task, settings, running, world, facts)
    say_remote(describe_held(engine.holdings, world.worker))
    if running.export is None:
        return engine, None, about
    if exported is not None and adapted.config is not None and not running.merge:
        exported = exported.of_adapter(adapted)
    return engine, world.together(lambda: Exporter(engine, exported, model, with_adapters=running.merge)), about


def _make_engine(
    adapted: Adapted, task: Task, settings: Settings, running: RunOptions, world: World, facts: Facts
) -> Engine:
    """Return the engine of this worker for a model and settings."""
    chunk = tuple(Meta((settings.chunk_size, *meta.shape[1:]), meta.dtype) for meta in facts.inputs)
    fill = adapted.fill(task.fill(settings.source, settings.seed))
    model = world.together(lambda: cut_model(adapted.model, chunk, fill, amp=settings.amp))
    if settings.parallel != "pipeline":
        return ReplicaEngine(
            model,
            world,
            chunks=settings.chunks,
            compress=settings.compress_backward,
            error_feedback=settings.error_feedback,
            seed=settings.seed,
            amp=settings.amp,
        )
    cutting = Cutting(
        layout=settings.layout,
        order=settings.schedule,
        chunks=settings.chunks,
        client_layers=settings.client_layers,
        memory_limit=running.memory_limit,
        in_process=settings.workers if running.in_process else None,
    )
    links = Links(
        forward=settings.compress_forward,
        backward=settings.compress_backward,
        seed=settings.seed,
        samples=facts.train_samples,
        copies_in=running.delta_cache,
        shaping=running.link,
    )
    engine = world.together(
        lambda: PipelineEngine(model, chunk, cutting, links, world, amp=settings.amp, recompute=settings.recompute)
    )
    world.together(lambda: engine.reserve_copies(running.delta_cache_limit))
    return engine


def _save_bytes(running: RunOptions, size: int) -> int:
    """Return the additional bytes for checkpoints of a size; a new one is complete before the oldest is deleted."""
    if running.save is None:
        return 0
    return size * max(1, running.keep + running.keep_best + 1 - len(checkpoints(running.save)))


def _companions(settings: Settings, run: Path | None) -> Path | None:
    """Return the folder where an earlier run from scratch saved its tokenizer, if this worker sees it."""
    return None if run is None or settings.config is None else companions_of(run)


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
        habits=SaveOptions(**{each.name: getattr(running, each.name) for each in fields(SaveOptions)}),
        first_units=first_units(engine),
        data=samples,
        expected_bytes=expected_bytes,
        companions=companions,
    )


def _plan(
    task: Task, settings: Settings, running: RunOptions, facts: Facts, engine: Engine, progress: Progress
) -> Plan:
    holdings = engine.holdings
    return Plan(
        task=task.name,
        metric=task.metric,
        parallel=settings.parallel,
        workers=settings.workers,
        chunks=settings.chunks,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
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
        accumulate=settings.accumulate,
        tokens=None if facts.shape.tokens is None else facts.inputs[0].shape[1],  # chats are padded to their longest
        schedule=engine.order,
    )
