"""Runs every way to train on the workers of one launch and times its steps."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from thinpipe.bench.pipeline.rows import Measured, make_row
from thinpipe.bench.pipeline.settings import Run, Settings
from thinpipe.bench.pipeline.training import Trainer, make_trainer, measure_costs
from thinpipe.codecs import codec
from thinpipe.measure.meter import peak_extra_bytes
from thinpipe.measure.record import Row
from thinpipe.pipeline.balance import UnitCost
from thinpipe.pipeline.report import report, reset_counters
from thinpipe.pipeline.warm import warm_codec
from thinpipe.workers.exchange import gather
from thinpipe.workers.launch import run_workers
from thinpipe.workers.network import thin_network


def measure_all(settings: Settings, on_row: Callable[[Row], None]) -> Iterator[Row]:
    """The rows of all launches. ``on_row`` hears of each as it is known, in the process of the first worker."""
    for workers, link, runs in settings.launches():
        with thin_network(link, workers) as network:
            # gloo even where every worker has a GPU: bytes are to pass the link, not the memory of the machine.
            arguments = (settings, link, runs, on_row)
            yield from run_workers(measure_runs, *arguments, workers=workers, network=network, backend="gloo")[0] or ()


def measure_runs(
    settings: Settings, link: float | None, runs: list[Run], on_row: Callable[[Row], None]
) -> list[Row] | None:
    """On every worker of a launch; the rows on the first, None elsewhere."""
    torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    costs = measure_costs(settings) if any(run.parallel == "pipeline" for run in runs) else []
    rows = []
    for run in runs:
        everyone = gather(_measure(run, settings, device, costs).to_json(), None, device)
        if dist.get_rank() == 0:
            rows.append(make_row(settings, run, link, [Measured.from_json(told) for told in everyone]))
            on_row(rows[-1])
    return rows if dist.get_rank() == 0 else None


def _measure(run: Run, settings: Settings, device: torch.device, costs: Sequence[UnitCost]) -> Measured:
    gc.collect()  # stages and their schedule hold each other: the last run's would stay in memory
    _warm_codec(run, device)
    set_up = make_trainer(run, settings, device, costs)
    trainers: list[Trainer] = []

    def first_steps() -> None:
        trainers.append(set_up())
        for _ in range(settings.warmup):
            trainers[0].step()

    peak_bytes = peak_extra_bytes(first_steps, device=device)
    trainer = trainers[0]
    if peak_bytes is not None and device.type == "cpu":
        peak_bytes += trainer.parameter_bytes  # which were there before, and on a GPU were not
    reset_counters(trainer.stages)
    trainer.updates.reset()
    samples_ms = tuple(_step_ms(trainer, device) for _ in range(settings.steps))
    return Measured(
        samples_ms=samples_ms,
        peak_bytes=peak_bytes,
        parameter_bytes=trainer.parameter_bytes,
        threads=torch.get_num_threads(),
        module_ms=trainer.module_ms(settings.steps),
        update_ms=trainer.updates.total_ms() / settings.steps,
        stage_ms=_stage_ms(trainer, settings.steps * (run.chunks or 1)),
        links=tuple(report(trainer.stages)) if trainer.stages else (),
        cuts=trainer.cuts,
    )


def _step_ms(trainer: Trainer, device: torch.device) -> float:
    """From when all workers begin until it is over for all."""
    dist.barrier()
    began = time.perf_counter()
    trainer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return (time.perf_counter() - began) * 1e3


def _stage_ms(trainer: Trainer, chunks: int) -> dict[int, tuple[float, float]]:
    times = {stage.stage_index: stage.compute_ms() for stage in trainer.stages}
    return {index: (kinds["forward"] / chunks, kinds["backward"] / chunks) for index, kinds in times.items()}


def _warm_codec(run: Run, device: torch.device) -> None:
    """Compile what the codec compiles: that takes memory and time once, not in a step."""
    if run.compress is not None:
        warm_codec(codec(run.compress), (64, 1024), torch.float32, device)
