"""The loop: steps, epochs, evaluations, checkpoints. The same on every worker and for every way to be parallel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from thinpipe.training.batches import SampleOrder, TrainingBatches
from thinpipe.training.checkpoints.manifest import Progress
from thinpipe.training.checkpoints.saving import Saver
from thinpipe.training.checkpoints.state import digest, worker_state
from thinpipe.training.engine import Engine
from thinpipe.training.evaluate import evaluate
from thinpipe.training.events import Epoch, Finished, Listener, Step
from thinpipe.training.optimize import learning_rate, set_learning_rate
from thinpipe.training.settings import Running, Settings
from thinpipe.training.step import train_step
from thinpipe.training.usage import Usage
from thinpipe.workers.activity import ACTIVITY
from thinpipe.workers.signals import Noted
from thinpipe.workloads.task import Metric, Split


class StepWatcher(Protocol):
    """Looks closely at some of the steps; the same ones on every worker."""

    def begin(self, engine: Engine, step: int) -> bool:
        """Whether it looks at this step, which is about to start."""
        ...

    def end(self, engine: Engine) -> None:
        """That step is done. A collective."""
        ...


class Loop:
    """One worker's run from where ``progress`` stands to its end."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        settings: Settings,
        running: Running,
        *,
        order: SampleOrder,
        batches: TrainingBatches | None,  # where this worker reads data
        validation: Split | None,  # likewise
        validation_samples: int,
        metric: Metric,
        stages: int,
        usage: Usage,
        listener: Listener | None,  # on the client
        saver: Saver | None = None,
        watchers: Sequence[StepWatcher] = (),
    ) -> None:
        self.engine, self.optimizer, self.progress = engine, optimizer, progress
        self.settings, self.running = settings, running
        self.order = order
        self.batches, self.validation, self.validation_samples = batches, validation, validation_samples
        self.metric, self.stages, self.usage, self.listener = metric, stages, usage, listener
        self.saver, self.watchers = saver, watchers
        self.unsaved: str | None = None  # why there is no checkpoint of the last step
        self.steps_per_epoch = progress.steps // settings.epochs
        self._first_step = progress.step
        self._seconds = self._epoch_seconds = 0.0  # of training steps
        self._samples = self._epoch_samples = 0  # seen by this process, not by the run

    def run(self, interrupted: Noted) -> Finished:
        began = time.perf_counter()
        last = min(self.progress.steps, self.running.steps or self.progress.steps)
        epoch_began = began
        while self.progress.step < last:
            self._step(interrupted.number)
            step = self.progress.step
            if step % self.steps_per_epoch == 0 or step == last:
                self._evaluate(epoch_began)
                epoch_began = time.perf_counter()
            if self._is_time_to_save(step, last):
                self._save()
        self.progress.parameters_sha256 = digest(self.engine)
        if self.saver is not None:
            self.unsaved = self._save()
        self.usage.collect()
        progress = self.progress
        return Finished(
            steps=progress.step - self._first_step,
            metric=progress.metric,
            best_metric=progress.best_metric,
            validation_loss=progress.validation_loss,
            train_loss=progress.train_loss,
            samples_per_s=self._samples / max(self._seconds, 1e-9),
            seconds=time.perf_counter() - began,
            workers=self.usage.workers(),
            links=self.usage.links(),
            parameters_sha256=progress.parameters_sha256,
        )

    def _step(self, interrupted: int) -> None:
        began = time.perf_counter()
        number, settings = self.progress.step, self.settings
        epoch, position = divmod(number, self.steps_per_epoch)
        ACTIVITY.note("training", number + 1)
        if position == 0:
            self.progress.begin_epoch()
        lr = learning_rate(
            number, steps=self.progress.steps, peak=settings.lr, schedule=settings.lr_schedule, warmup=settings.warmup
        )
        set_learning_rate(self.optimizer, lr)
        watching = [watcher for watcher in self.watchers if watcher.begin(self.engine, number + 1)]
        batch = None if self.batches is None else self.batches.batch(epoch, position)
        self.engine.tell_samples(self.order.batch(epoch, position))
        done = train_step(
            self.engine,
            self.optimizer,
            batch,
            step=number + 1,
            stages=self.stages,
            clip_norm=settings.clip_norm,
            interrupted=interrupted,
        )
        seconds = time.perf_counter() - began
        for watcher in watching:
            watcher.end(self.engine)
        self._count(seconds, done.waited_s)
        self.progress.count(loss=done.loss, correct=done.correct, samples=settings.batch_size)
        if self.listener is not None:
            self.listener.stepped(
                Step(
                    step=number + 1,
                    epoch=epoch + 1,
                    samples=settings.batch_size,
                    loss=done.loss,
                    accuracy=done.correct / settings.batch_size,
                    lr=lr,
                    gradient_norm=None if settings.clip_norm is None else done.gradient_norm,
                    wire_bytes=done.wire_bytes,
                    seconds=seconds,
                )
            )

    def _count(self, seconds: float, waited_s: float) -> None:
        self.usage.step(seconds=seconds, waited_s=waited_s)
        self._seconds += seconds
        self._epoch_seconds += seconds
        self._samples += self.settings.batch_size
        self._epoch_samples += self.settings.batch_size

    def _evaluate(self, epoch_began: float) -> None:
        """At the end of an epoch, and where the run is told to stop."""
        ACTIVITY.note("evaluation")
        self.engine.check_replicas(self.progress.step)
        # Replicas evaluate apart, each with batches of its own size.
        size = self.settings.batch_size // self.settings.replicas
        loss, metric = evaluate(self.engine, self.validation, self.validation_samples, size, self.metric)
        progress = self.progress
        progress.evaluated(validation_loss=loss, metric=metric)
        if self.listener is not None:
            self.listener.evaluated(
                Epoch(
                    epoch=-(-progress.step // self.steps_per_epoch),
                    step=progress.step,
                    train_loss=progress.train_loss,
                    train_accuracy=progress.epoch_correct / progress.epoch_samples,
                    validation_loss=loss,
                    validation_metric=metric,
                    samples_per_s=self._epoch_samples / self._epoch_seconds,
                    seconds=time.perf_counter() - epoch_began,
                )
            )
        self._epoch_seconds, self._epoch_samples = 0.0, 0

    def _is_time_to_save(self, step: int, last: int) -> bool:
        if self.saver is None or step == last:  # the last one is saved with the digest
            return False
        return step % (self.running.save_every or self.steps_per_epoch) == 0

    def _save(self) -> str | None:
        """Why there is no checkpoint of this step, if so: the run goes on, and the next time is another try."""
        assert self.saver is not None
        ACTIVITY.note("saving")
        done = self.saver.save(self.progress, worker_state(self.engine, self.optimizer))
        if self.listener is not None and done.problem is not None:
            self.listener.save_failed(self.progress.step, done.problem)
        elif self.listener is not None:
            self.listener.saved(self.progress.step, str(done.path))
        return done.problem
