"""The training loop: steps, epochs, evaluations and checkpoints, the same on every worker and for every engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from thinpipe.comm.control import ACTIVITY
from thinpipe.comm.errors import StoppedTogether
from thinpipe.comm.signals import Noted
from thinpipe.links.counters import STAMPS
from thinpipe.pipeline.report import LinkReport
from thinpipe.system.sizes import peak_bytes
from thinpipe.train.batches import Samples
from thinpipe.train.checkpoints.best import improves
from thinpipe.train.checkpoints.interval import SaveTimer
from thinpipe.train.checkpoints.manifest import Progress
from thinpipe.train.checkpoints.saving import Saver
from thinpipe.train.checkpoints.state import digest, worker_state
from thinpipe.train.engines.auto_bits import AutoBits, adaptive_links
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.pipeline import PipelineEngine
from thinpipe.train.engines.step import stop_request, train_step
from thinpipe.train.events import ChosenBits, Epoch, Finished, Listener, Plan, Step, WorkerUse
from thinpipe.train.metrics import evaluate
from thinpipe.train.optimize import learning_rate
from thinpipe.train.recovery.keeper import Keeper
from thinpipe.train.settings import AUTO_EVERY, Settings
from thinpipe.train.watchers import StepWatcher


class Loop:
    """One worker's run, from the step in ``progress`` to its end."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        settings: Settings,
        plan: Plan,
        *,
        samples: Samples,
        saver: Saver | None = None,
        watchers: Sequence[StepWatcher] = (),
    ) -> None:
        self.engine, self.optimizer, self.progress = engine, optimizer, progress
        self.settings, self.plan, self.samples = settings, plan, samples
        self.saver, self.watchers = saver, watchers
        self.keeper: Keeper | None = None  # if the run continues without a lost server
        self.listener: Listener | None = None
        self.auto = None
        if isinstance(engine, PipelineEngine) and adaptive_links(plan.links):
            self.auto = AutoBits(engine, settings.auto_every or AUTO_EVERY, settings.accumulate, progress.levels)
            engine.shared = self.auto
        self.unsaved: str | None = None  # why there is no checkpoint of the last step
        self._timer = None if saver is None else SaveTimer(saver.options.save_every, plan.steps_per_epoch)
        shapes = [link.shapes for link in plan.links]
        self.usage = Usage(engine, messages_per_step(shapes, settings.chunks * settings.accumulate))
        self._seconds = self._epoch_seconds = 0.0  # of training steps
        self._samples = self._epoch_samples = 0  # seen by this process, not by the run

    def run(self, listener: Listener | None, interrupted: Noted) -> Finished:
        """Train to the last step of the plan; only the client has a listener.

        If a worker receives a stop signal, raise StoppedTogether on all workers once the current step is done,
        evaluated if that is due, and saved.
        """
        self.listener = listener
        began = epoch_began = time.perf_counter()
        last = self.plan.last_step
        improved = False
        self._report_bits()
        ended = self.progress.stops_early(self.settings.early_stopping)  # before it was resumed
        while self.progress.step < last and not ended:
            save_due, stop, pause = self._step(interrupted)
            improved = False
            step = self.progress.step
            if self._is_time_to_evaluate(step):
                self._evaluate(epoch_began)
                epoch_began = time.perf_counter()
                improved, ended = self._verdict()
                stop = stop or stop_request(self.engine.world, self._signal(interrupted))
            if step == last or ended:  # saved below, with the digest; a finished run is not stopped
                break
            if self.saver is not None and (stop or save_due or improved or self._is_save_due_after(step)):
                self._save(self.saver, is_best=improved)
            if stop:
                raise stop
            if self.keeper is not None:
                take = partial(self.keeper.take, self.engine, self.optimizer, self.progress)
                self.keeper.pilot.step_done(step, take, paused=pause)
        self.progress.parameters_sha256 = digest(self.engine)
        if self.saver is not None:
            self.unsaved = self._save(self.saver, is_best=improved)
        self.usage.collect()
        progress = self.progress
        return Finished(
            steps=progress.step - self.plan.first_step,
            metric=progress.metric,
            best_metric=progress.best_metric,
            best_step=None if progress.best is None else progress.best[0],
            validation_loss=progress.validation_loss,
            train_loss=progress.train_loss,
            samples_per_s=self._samples / max(self._seconds, 1e-9),
            seconds=time.perf_counter() - began,
            workers=self.usage.workers(),
            links=self.usage.links(),
            bits_per_byte=progress.bits_per_byte,
            parameters_sha256=progress.parameters_sha256,
            stopped_early=progress.evaluations_without_best if ended else 0,
        )

    def _signal(self, interrupted: Noted) -> int:
        """Return the signal that all workers stop for, or 0; a server leaves alone if the run continues without it."""
        if self.keeper is None or self.engine.world.is_client or not interrupted.number:
            return interrupted.number
        self.keeper.pilot.leave(interrupted.number)
        return 0

    def _step(self, interrupted: Noted) -> tuple[bool, StoppedTogether | None, bool]:
        """Run a step; return whether to save it, the exception to stop the run with after it, and whether to pause."""
        began = time.perf_counter()
        number, settings = self.progress.step, self.settings
        epoch, position = divmod(number, self.plan.steps_per_epoch)
        ACTIVITY.note("training", number + 1)
        if position == 0:
            self.progress.begin_epoch()
        lr = learning_rate(
            number, steps=self.progress.steps, peak=settings.lr, schedule=settings.lr_schedule, warmup=settings.warmup
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.auto is not None:
            self.auto.begin(number + 1)
        watching = [watcher for watcher in self.watchers if watcher.begin(number + 1)]
        training = self.samples.training
        batches = [None] * settings.accumulate if training is None else training.step(epoch, position)
        self.engine.samples = self.samples.order.step(epoch, position)
        done = train_step(
            self.engine,
            self.optimizer,
            *batches,
            step=number + 1,
            clip_norm=settings.clip_norm,
            interrupted=lambda: self._signal(interrupted),
            save_due=self.engine.world.is_client and self._timer is not None and self._timer.is_due(),
            pause=self.keeper is not None and self.keeper.pilot.wants_pause(),
            another=not self._is_time_to_evaluate(number + 1),
        )
        seconds = time.perf_counter() - began
        for watcher in watching:
            watcher.end()
        ACTIVITY.longest_step_s = max(ACTIVITY.longest_step_s, seconds)
        self._count(seconds, done.waited_s)
        self.progress.count(
            loss=done.loss, correct=done.correct, samples=settings.step_samples, wire_bytes=done.wire_bytes
        )
        if self.auto is not None and self.auto.receive(done.shared, seconds):
            self._report_bits()
        if self.listener is not None:
            self.listener.stepped(
                Step(
                    step=number + 1,
                    epoch=epoch + 1,
                    samples=settings.step_samples,
                    loss=done.loss,
                    accuracy=done.correct / settings.step_samples,
                    lr=lr,
                    gradient_norm=None if settings.clip_norm is None else done.gradient_norm,
                    wire_bytes=done.wire_bytes,
                    seconds=seconds,
                )
            )
        return done.save_due, done.stop, done.pause

    def _report_bits(self) -> None:
        """Report the bits of the next step to the listener, and keep them for checkpoints."""
        if self.auto is None:
            return
        self.progress.levels = tuple(self.auto.levels)
        if self.listener is not None:
            bits = {f"{hop[0]} to {hop[1]}": level for hop, level in zip(self.auto.hops, self.auto.levels, strict=True)}
            self.listener.bits_chosen(ChosenBits(step=self.progress.step + 1, bits=bits))

    def _count(self, seconds: float, waited_s: float) -> None:
        self.usage.step(seconds=seconds, waited_s=waited_s)
        self._seconds += seconds
        self._epoch_seconds += seconds
        self._samples += self.settings.step_samples
        self._epoch_samples += self.settings.step_samples

    def _evaluate(self, epoch_began: float) -> None:
        """Evaluate the validation part, and report the result to the listener. A collective."""
        ACTIVITY.note("evaluation")
        self.engine.check_replicas(self.progress.step)
        # Replicas evaluate separate batches, each of the size of its share.
        size = self.settings.batch_size // self.settings.replicas
        plan, progress = self.plan, self.progress
        found = evaluate(self.engine, self.samples.validation, plan.validation_samples, size, plan.metric)
        progress.evaluated(validation_loss=found.loss, metric=found.metric, bits_per_byte=found.bits_per_byte)
        if self.listener is not None:
            self.listener.evaluated(
                Epoch(
                    epoch=-(-progress.step // self.plan.steps_per_epoch),
                    step=progress.step,
                    train_loss=progress.train_loss,
                    train_accuracy=progress.epoch_correct / progress.epoch_samples,
                    validation_loss=found.loss,
                    validation_metric=found.metric,
                    bits_per_byte=found.bits_per_byte,
                    samples_per_s=self._epoch_samples / self._epoch_seconds,
                    seconds=time.perf_counter() - epoch_began,
                )
            )
        self._epoch_seconds, self._epoch_samples = 0.0, 0

    def _is_time_to_evaluate(self, step: int) -> bool:
        every = self.plan.evaluate_every
        is_requested = every is not None and step % every == 0
        return is_requested or step % self.plan.steps_per_epoch == 0 or step == self.plan.last_step

    def _is_save_due_after(self, step: int) -> bool:
        return self._timer is not None and self._timer.is_due_after(step)

    def _verdict(self) -> tuple[bool, bool]:
        """Return whether the client keeps this model as the best so far, and whether it stops early. A collective."""
        patience = self.settings.early_stopping
        if self.saver is None and patience is None:
            return False, False
        keeps = self.saver is not None and self.saver.options.keep_best and improves(self.progress)
        improved, ended = self.engine.world.gather([keeps, self.progress.stops_early(patience)])[0]
        return improved, ended

    def _save(self, saver: Saver, *, is_best: bool) -> str | None:
        """Save; return why there is no checkpoint of this step, if so. The run continues, and the next save retries."""
        ACTIVITY.note("saving")
        assert self._timer is not None
        self._timer.restart()
        done = saver.save(self.progress, worker_state(self.engine, self.optimizer), is_best=is_best)
        if self.listener is not None and done.problem is not None:
            self.listener.save_failed(self.progress.step, done.problem)
        elif self.listener is not None:
            self.listener.saved(self.progress.step, str(done.path))
        return done.problem


class Usage:
    """Time and traffic of the steps, summed by link and worker. ``collect`` and ``workers`` are collectives."""

    def __init__(self, engine: Engine, messages_per_step: int) -> None:
        self._engine = engine
        self._links: dict[tuple[int, int], LinkReport] = {}
        self._steps_ms = self._elsewhere_ms = 0.0
        # Links keep timestamps of STAMPS messages at most; without them waiting and transfer cannot be separated.
        self._collect_every = max(1, STAMPS // max(messages_per_step, 1))
        self._uncollected = 0

    def step(self, *, seconds: float, waited_s: float) -> None:
        """Count a completed step; ``waited_s`` of its time was spent waiting for other workers to finish theirs."""
        self._steps_ms += (seconds - waited_s) * 1e3
        self._uncollected += 1
        if self._uncollected == self._collect_every:
            self.collect()

    def collect(self) -> None:
        reports, elsewhere_ms = self._engine.collect_links()
        self._elsewhere_ms += elsewhere_ms
        self._uncollected = 0
        for report in reports:
            ends = report.source, report.target
            self._links[ends] = self._links[ends].plus(report) if ends in self._links else report

    def links(self) -> tuple[LinkReport, ...]:
        return tuple(self._links.values())

    def workers(self) -> tuple[WorkerUse, ...]:
        engine = self._engine
        peak_mib = (peak_bytes(engine.world.device) or 0) / 2**20
        mine = [sorted(engine.stages), self._steps_ms - self._elsewhere_ms, peak_mib]
        return tuple(
            WorkerUse(worker=worker, stages=tuple(stages), compute_ms=compute_ms, peak_mib=peak)
            for worker, (stages, compute_ms, peak) in enumerate(engine.world.gather(mine))
        )


def messages_per_step(shapes: Iterable[tuple[tuple[int, ...], ...]], chunks: int) -> int:
    """Return the messages per step on the busiest link, given the tensor shapes of one chunk on each link."""
    return chunks * max((len(each) for each in shapes), default=0)
