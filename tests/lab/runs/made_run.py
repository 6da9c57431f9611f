"""A small run as events for listeners, without training anything."""

from __future__ import annotations

import time

from thinpipe.lab.runs.summary import RecordFile
from thinpipe.pipeline.report import LinkReport
from thinpipe.train.events import Epoch, Finished, Holding, LinkPlan, Listener, Plan, Step, WorkerUse

EPOCHS, STEPS = 3, 4  # epochs, steps per epoch
SHAPES = {0: (8, 16, 16, 16), 1: (8, 320, 2, 2)}  # of what leaves each stage, per chunk
TENSOR_BYTES = {0: 1048576, 1: 327680}  # per step
WIRE_BYTES = {0: 262400, 1: 82176}
DIRECTIONS = ((0, 1, "forward"), (1, 2, "forward"), (1, 0, "backward"), (2, 1, "backward"))


def make_plan(parallel: str = "pipeline", *, first_step: int = 0, metric: str = "accuracy") -> Plan:
    workers = 1 if parallel == "none" else 2
    whole = tuple(
        Holding(
            stage=0,
            worker=worker,
            first_unit=0,
            units=20,
            unit_names=("ConvLayer", *["Residual"] * 18, "Head"),
            parameters=2_236_682,
            trained=2_236_682,
        )
        for worker in range(workers)
    )
    cut = (
        Holding(stage=0, worker=0, first_unit=0, units=1, unit_names=("ConvLayer",), parameters=928, trained=928),
        Holding(
            stage=1,
            worker=1,
            first_unit=1,
            units=18,
            unit_names=("Stem", *["Residual"] * 17),
            parameters=2_222_944,
            trained=2_222_944,
        ),
        Holding(stage=2, worker=0, first_unit=19, units=1, unit_names=("Head",), parameters=12_810, trained=12_810),
    )
    return Plan(
        task="digits",
        metric=metric,
        parallel=parallel,
        workers=workers,
        chunks=8,
        batch_size=64,
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        first_step=first_step,
        last_step=EPOCHS * STEPS,
        evaluate_every=None,
        train_samples=256,
        validation_samples=100,
        parameters=2_236_682,
        trained=2_236_682,
        holdings=cut if parallel == "pipeline" else whole,
        links=tuple(
            LinkPlan(
                source=source,
                target=target,
                source_worker=source % 2,
                target_worker=target % 2,
                direction=direction,
                spec="sort:6+2",
                shapes=(SHAPES[min(source, target)],),
                tensor_bytes=TENSOR_BYTES[min(source, target)],
                wire_bytes=WIRE_BYTES[min(source, target)],
            )
            for source, target, direction in DIRECTIONS
        )
        if parallel == "pipeline"
        else (),
    )


def make_step(step: int, *, wire_bytes: int = 2 * sum(WIRE_BYTES.values())) -> Step:
    return Step(
        step=step,
        epoch=(step - 1) // STEPS + 1,
        samples=64,
        loss=2.4 / step,
        accuracy=1 - 0.9 / step,
        lr=0.05 / step,
        gradient_norm=1.5,
        wire_bytes=wire_bytes,
        seconds=0.08,
    )


def make_epoch(epoch: int) -> Epoch:
    return Epoch(
        epoch=epoch,
        step=epoch * STEPS,
        train_loss=1.2 / epoch,
        train_accuracy=1 - 0.5 / epoch,
        validation_loss=1.0 / epoch,
        validation_metric=1 - 0.4 / epoch,
        samples_per_s=800.0,
        seconds=1.25,
    )


def make_end(parallel: str = "pipeline", *, steps: int = EPOCHS * STEPS) -> Finished:
    links = tuple(
        LinkReport(
            source=source,
            target=target,
            source_worker=source % 2,
            target_worker=target % 2,
            direction=direction,
            messages=4 * steps,
            tensor_bytes=steps * TENSOR_BYTES[min(source, target)],
            wire_bytes=steps * WIRE_BYTES[min(source, target)],
            encode_ms=steps * 2.0,
            decode_ms=steps * 1.0,
            wait_ms=steps * 10.0 * target,
            transfer_ms=steps * 0.5,
            blocked_ms=steps * 10.5,
            link_mb_per_s=None,
        )
        for source, target, direction in DIRECTIONS
    )
    return Finished(
        steps=steps,
        metric=0.867,
        best_metric=0.871,
        validation_loss=0.333,
        train_loss=0.4,
        samples_per_s=801.5,
        seconds=3.9,
        workers=tuple(
            WorkerUse(
                worker=worker,
                stages=stages if parallel == "pipeline" else (0,),
                compute_ms=steps * (20.0 + 30.0 * worker),
                peak_mib=410.0 + worker,
            )
            for worker, stages in ((0, (0, 2)), (1, (1,)))[: 1 if parallel == "none" else 2]
        ),
        links=links if parallel == "pipeline" else (),
        parameters_sha256="c0ffee",
    )


def play(listener: Listener, parallel: str = "pipeline", *, first_step: int = 0, delay: float = 0.0) -> None:
    """The whole run, from its plan to its end."""
    wire_bytes = {} if parallel == "pipeline" else {"wire_bytes": 8_946_728 if parallel == "data" else 0}
    listener.planned(make_plan(parallel, first_step=first_step))
    for step in range(first_step + 1, EPOCHS * STEPS + 1):
        time.sleep(delay)
        listener.stepped(make_step(step, **wire_bytes))
        if step % STEPS == 0:
            listener.evaluated(make_epoch(step // STEPS))
            listener.saved(step, f"run/step-{step}")
    listener.finished(make_end(parallel, steps=EPOCHS * STEPS - first_step))


SETTINGS = {
    "config": {"command": ["thinpipe", "train"], "threads": None},
    "seed": 3,
    "forward": "sort:6+2",
    "backward": "none",
}


def record_file(path, **changes):
    return RecordFile(path, **SETTINGS | changes)
