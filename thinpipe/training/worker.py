"""What every worker of a run does: read data or be told its shape, build the model, take its part, train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from thinpipe.options import OptionError
from thinpipe.training.batches import SampleOrder, TrainingBatches
from thinpipe.training.capture import StepCapture
from thinpipe.training.checkpoints.fingerprint import difference, fingerprint
from thinpipe.training.checkpoints.folder import FolderLock, check_shared, check_unused, checkpoints, sweep
from thinpipe.training.checkpoints.manifest import Habits, Progress
from thinpipe.training.checkpoints.resume import Resumed, first_units, resume
from thinpipe.training.checkpoints.saving import Saver, UnsavedError
from thinpipe.training.checkpoints.state import seed_worker
from thinpipe.training.copies import reserve_copies
from thinpipe.training.engine import Engine
from thinpipe.training.events import Finished, Listener, Plan
from thinpipe.training.loop import Loop, StepWatcher
from thinpipe.training.optimize import make_optimizer
from thinpipe.training.pipeline_engine import PipelineEngine
from thinpipe.training.place import Place
from thinpipe.training.replica_engine import ReplicaEngine
from thinpipe.training.settings import Running, Settings
from thinpipe.training.shapes import Meta, meta_of
from thinpipe.training.tracing import StepTrace
from thinpipe.training.usage import Usage, messages_per_step
from thinpipe.version import __version__
from thinpipe.workers.backend import CPU
from thinpipe.workers.exchange import DisagreementError, agree
from thinpipe.workers.signals import noted_signals
from thinpipe.workloads.task import Data, Shape, Task

Result = TypeVar("Result")

_STATES = {"sgd": 1, "adamw": 2}  # tensors that an optimizer keeps for each parameter


class SetupError(ValueError):
    """What the user gave cannot be trained; raised alike on all workers, before the first step."""


@dataclass(frozen=True)
class Facts:
    """What those who read the data tell the others."""

    shape: Shape
    train_samples: int
    validation_samples: int
    inputs: tuple[Meta, ...]  # of one sample

    def to_json(self) -> dict[str, Any]:
        inputs = [[list(meta.shape), str(meta.dtype).removeprefix("torch.")] for meta in self.inputs]
        return asdict(self) | {"inputs": inputs}

    @staticmethod
    def from_json(told: dict[str, Any]) -> Facts:
        inputs = tuple(Meta(tuple(shape), getattr(torch, dtype)) for shape, dtype in told["inputs"])
        return Facts(Shape(**told["shape"]), told["train_samples"], told["validation_samples"], inputs)


def train(
    task: Task,
    settings: Settings,
    running: Running,
    place: Place,
    make_listener: Callable[[], Listener],
    check_room: Callable[[int, int], None] = lambda save_bytes, capture_bytes: None,
) -> Finished:
    """One worker's run; the client's result counts.

    ``make_listener`` is called on the client; ``check_room`` too, with the bytes that checkpoints and capture take.
    """
    if place.workers > 1:
        try:
            agree(_must_agree(settings, running), place.words, CPU)
        except DisagreementError as error:
            raise SetupError(str(error)) from None
    lock = _together(place, lambda: _take_folder(running, place))
    try:
        if running.save is not None and place.workers > 1 and not running.save_local:
            save = running.save
            _together(place, lambda: check_shared(save, place))
        notices = [] if lock is None or lock.notice is None else [lock.notice]
        return _train(task, settings, running, place, make_listener, check_room, notices)
    finally:
        if lock is not None:
            lock.release()


def _take_folder(running: Running, place: Place) -> FolderLock | None:
    """The client's hold on the folder for checkpoints, which is then clear of what broken runs left."""
    if running.save is None or not place.is_client:
        return None
    lock = FolderLock(running.save)
    try:
        if running.resume is None:
            check_unused(running.save)
        if lock.is_held:
            sweep(running.save)
    except BaseException:
        lock.release()
        raise
    return lock


def _train(
    task: Task,
    settings: Settings,
    running: Running,
    place: Place,
    make_listener: Callable[[], Listener],
    check_room: Callable[[int, int], None],
    notices: list[str],
) -> Finished:
    data, facts = _read(task, settings, place)
    samples = {} if running.save is None and running.resume is None else _fingerprint(data, place)
    engine = _make_engine(task, settings, running, place, facts)
    engine.warm_up()
    optimizer = make_optimizer(
        engine.parameters(),
        name=settings.optimizer,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
    )
    seed_worker(settings.seed, place.worker)
    steps_per_epoch = facts.train_samples // settings.batch_size
    progress = Progress(steps=steps_per_epoch * settings.epochs, metric_name=task.metric)
    if running.resume is not None:
        resumed: Resumed = _together(place, lambda: resume(running, settings, engine, optimizer, samples))
        progress = resumed.progress
        notices = notices + resumed.notices
    last = min(progress.steps, running.steps or progress.steps)
    capture = _together(place, lambda: _capture(running, settings, engine, progress.step, last))
    expected_bytes = place.gather(_state_bytes(engine, settings))
    save_bytes = _save_bytes(running, sum(expected_bytes))
    capture_bytes = 0 if capture is None else 2 * capture.file_bytes  # the new one is whole before the old one goes
    _together(place, lambda: check_room(save_bytes, capture_bytes) if place.is_client else None)
    watchers: list[StepWatcher] = [StepTrace(running.trace, progress.step, last)]
    if capture is not None:
        watchers.append(capture)
    plan = _plan(task, settings, facts, engine, progress, last)
    loop = Loop(
        engine,
        optimizer,
        progress,
        settings,
        running,
        order=SampleOrder(facts.train_samples, batch_size=settings.batch_size, seed=settings.seed),
        batches=_batches(data, settings, engine),
        validation=None if data is None else data.validation,
        validation_samples=facts.validation_samples,
        metric=task.metric,
        stages=1 + max(holding.stage for holding in plan.holdings),
        usage=Usage(
            engine,
            forward=settings.compress_forward,
            backward=settings.compress_backward,
            messages_per_step=messages_per_step([link.shapes for link in plan.links], settings.chunks),
        ),
        listener=(listener := make_listener() if place.is_client else None),
        saver=_saver(running, settings, engine, samples, expected_bytes),
        watchers=watchers,
    )
    try:
        if listener is not None:
            for line in notices:
                listener.noticed(line)
            listener.planned(plan)
        with noted_signals() as interrupted:
            end = loop.run(interrupted)
        if listener is not None:
            listener.finished(end)
    except BaseException as error:
        if listener is not None:
            listener.failed(error)
        raise
    if loop.unsaved is not None:
        raise UnsavedError(f"the run came to its end, but its last checkpoint could not be saved: {loop.unsaved}")
    return end


def _must_agree(settings: Settings, running: Running) -> dict[str, Any]:
    """What all workers must have been started with: each option that makes them do something together."""
    capture = running.capture
    return settings.to_json() | {
        # Whether there are such files; where is each machine's own affair.
        **{name: getattr(running, name) is not None for name in ("save", "resume", "trace", "capture")},
        **{name: getattr(running, name) for name in ("save_local", "save_every", "keep", "steps", "patience_s")},
        "captured": None if capture is None else [capture.steps, capture.chunks, capture.limit],
        "torch version": torch.__version__,
        "thinpipe version": __version__,
    }


def _together(place: Place, function: Callable[[], Result]) -> Result:
    """Call a function on all workers; a ValueError on one is an error on all of them, and none waits for another."""
    result, problem = None, None
    try:
        result = function()
    except ValueError as error:
        problem = str(error)
    problems = [each for each in place.gather(problem) if each is not None]
    if problems:
        raise SetupError(problems[0])
    return result  # type: ignore[return-value]


def _read(task: Task, settings: Settings, place: Place) -> tuple[Data | None, Facts]:
    """Data where it is needed: on the client, at the end of a line, which has the loss, and on every replica."""
    is_end = settings.parallel == "pipeline" and settings.layout == "linear" and place.worker == place.workers - 1
    reads = place.is_client or is_end or settings.parallel == "data"

    def read() -> tuple[Data, Facts] | None:
        if not reads:
            return None
        data, shape = task.load(settings.source)
        if len(data.train) < settings.batch_size:
            raise OptionError(
                f"a batch is filled with different samples: {{batch_size}} {settings.batch_size} is more than the "
                f"{len(data.train)} samples to train on; take a smaller one"
            )
        sample = data.validation.batch(torch.zeros(1, dtype=torch.int64))
        return data, Facts(shape, len(data.train), len(data.validation), meta_of(sample.inputs))

    found = _together(place, read)
    told = place.gather(found[1].to_json() if found else None)
    return (found[0] if found else None), Facts.from_json(told[0])


def _fingerprint(data: Data | None, place: Place) -> dict[str, Any]:
    """Of the client's samples; all who read samples must have the same. A collective."""
    told = place.gather(_together(place, lambda: None if data is None else fingerprint(data)))
    for worker, theirs in enumerate(told):
        other = None if theirs is None else difference(told[0], theirs)
        if other is not None:
            raise SetupError(
                f"all who read data read the same, but worker {worker} does not have the client's: {other}"
            )
    return dict(told[0])


def _make_engine(task: Task, settings: Settings, running: Running, place: Place, facts: Facts) -> Engine:
    def build() -> nn.Module:
        torch.manual_seed(settings.seed)  # the same weights on all workers, and whatever is parallel
        return task.build(facts.shape, settings.source)

    model = _together(place, build)
    if settings.parallel != "pipeline":
        return ReplicaEngine(model, settings, place)
    chunk = tuple(Meta((settings.chunk_size, *meta.shape[1:]), meta.dtype) for meta in facts.inputs)
    samples, copies_in = facts.train_samples, running.delta_cache
    engine = _together(
        place, lambda: PipelineEngine(model, chunk, settings, place, samples=samples, copies_in=copies_in)
    )
    _together(place, lambda: reserve_copies(engine, running))
    return engine


def _batches(data: Data | None, settings: Settings, engine: Engine) -> TrainingBatches | None:
    if data is None:
        return None
    return TrainingBatches(data.train, batch_size=settings.batch_size, seed=settings.seed, share=engine.shares)


def _capture(running: Running, settings: Settings, engine: Engine, first: int, last: int) -> StepCapture | None:
    if running.capture is None:
        return None
    assert isinstance(engine, PipelineEngine)  # the command line sees to it
    return StepCapture(running.capture, settings, engine, first_step=first, last_step=last)


def _state_bytes(engine: Engine, settings: Settings) -> int:
    """About what this worker has in a checkpoint."""
    mine = 0
    if engine.owns_state:
        for stage in engine.stages.values():
            mine += sum(tensor.numel() * tensor.element_size() for tensor in stage.tensors().values())
            kept = sum(parameter.numel() * parameter.element_size() for parameter in stage.parameters().values())
            mine += kept * _STATES[settings.optimizer]
    if settings.parallel == "data" and settings.compress_backward != "none":  # what is lost on the way, for each
        mine += sum(parameter.numel() * parameter.element_size() for parameter in engine.parameters())
    return mine + sum(value.numel() * value.element_size() for value in engine.memory().values())


def _save_bytes(running: Running, size: int) -> int:
    """What checkpoints of a size will take beside those that are there: a new one is whole before the oldest goes."""
    if running.save is None:
        return 0
    return size * max(1, running.keep + 1 - len(checkpoints(running.save)))


def _saver(
    running: Running, settings: Settings, engine: Engine, samples: dict[str, Any], expected_bytes: list[int]
) -> Saver | None:
    if running.save is None:
        return None
    return Saver(
        running.save,
        engine.place,
        settings=settings,
        habits=Habits(save_every=running.save_every, keep=running.keep, save_local=running.save_local),
        first_units=first_units(engine),
        data=samples,
        expected_bytes=expected_bytes,
    )


def _plan(task: Task, settings: Settings, facts: Facts, engine: Engine, progress: Progress, last: int) -> Plan:
    holdings = engine.holdings()
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
        last_step=last,
        train_samples=facts.train_samples,
        validation_samples=facts.validation_samples,
        parameters=sum({holding.stage: holding.parameters for holding in holdings}.values()),
        holdings=holdings,
        links=engine.link_plans(),
    )
