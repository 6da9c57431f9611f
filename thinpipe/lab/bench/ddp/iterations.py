"""Measurement of the iteration time of DistributedDataParallel: each model on each group of replicas, in one launch."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from torch import nn

from thinpipe.comm.backend import default_backend
from thinpipe.comm.group import Group
from thinpipe.ddp import DDPState, torch_hook
from thinpipe.lab.bench.barrier import barrier_group
from thinpipe.lab.bench.ddp.ddp_columns import COLUMNS, KIND, ReplicaGroup, ReplicaTimes, make_groups, make_row
from thinpipe.lab.bench.ddp.ddp_options import DTYPES, POWERSGD_START, DDPBenchOptions
from thinpipe.lab.bench.ddp.ddp_tables import plot_speed, result_tables, row_line
from thinpipe.lab.bench.meter import time_iterations
from thinpipe.lab.bench.models import Shapes, Workload, build, check_model
from thinpipe.lab.bench.outcome import Outcome, Print
from thinpipe.lab.netem.network import thin_network
from thinpipe.lab.records.environment import environment, gpu_topology
from thinpipe.lab.records.record import Record, Row
from thinpipe.launch.workers import run_workers
from thinpipe.train.engines.replica import replicate
from thinpipe.train.engines.step import bare_step
from thinpipe.train.engines.world import World, join_world
from thinpipe.train.shaping import link_facts


def measure(options: DDPBenchOptions, on_row: Print, on_progress: Print) -> Outcome | None:
    """Measure on all replicas; return the results in the first one's process, None in others."""
    workers, link = options.local_workers, options.emulated_link
    with thin_network(link, workers or 1) as network:
        record: Record | None = run_workers(measure_iterations, options, on_row, workers=workers, network=network)[0]
    if record is None:
        return None
    title = "Iteration time of DistributedDataParallel"
    return Outcome(title=title, record=record, tables=result_tables(record), plot=plot_speed(record))


def measure_iterations(options: DDPBenchOptions, on_row: Print) -> Record | None:
    """Measure on this replica and return the record on the first one, None on the others. A collective."""
    device = options.found_device.type
    world = join_world(device)
    backend = options.backend or default_backend(world.device)  # NCCL where each worker has its own GPU
    everyone = barrier_group()
    machines = everyone.gather(world.machine)
    groups = make_groups(machines, backend, "G" if device == "cuda" else "C")
    first = world.is_client
    config = {
        **{name: value for name, value in asdict(options).items() if name not in ("link", "workers")},
        **link_facts(options.link),
        "device": device,
        "backend": backend,
        "replicas": world.workers,
        "machines": 1 + max(machines),
    }
    facts = {
        **environment(),
        "libraries": list(dict.fromkeys(map(check_model, options.models))),
        "cuda": torch.version.cuda,
        "topology": gpu_topology() if first else None,
    }
    rows: list[Row] = []
    for model in options.models:
        for group in groups:
            mine = _measure_group(model, options, group, world) if world.worker < group.size else None
            gathered = everyone.gather(None if mine is None else asdict(mine))  # the other replicas wait here
            if first:
                times = [ReplicaTimes(**each) for each in gathered[: group.size]]
                rows.append(make_row(model, group, options.batch_size, device, times))
                on_row(row_line(rows[-1]))
    return Record(kind=KIND, config=config, columns=COLUMNS, rows=tuple(rows), environment=facts) if first else None


def _measure_group(model: str, options: DDPBenchOptions, group: ReplicaGroup, world: World) -> ReplicaTimes:
    shapes = Shapes(batch_size=options.batch_size, image_size=options.image_size, tokens=options.tokens)
    device = world.device
    workload = build(model, shapes, dtype=DTYPES[options.dtype], device=device)
    parallel, state = _wrap(workload, options, group, world) if group.ddp else (workload.model, None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)

    def iterate() -> None:
        # Not thinpipe's training step, which synchronizes with the GPU to check the loss: only torch's DDP.
        bare_step(optimizer, lambda: workload.loss(parallel(*workload.inputs)))

    for _ in range(options.warmup):
        iterate()
    if group.ddp:
        Group.of(group.process_group, device).barrier()
    times = time_iterations(iterate, iterations=options.iterations, device=device)
    return ReplicaTimes(
        samples_s=tuple(sample / 1e3 for sample in times.samples_ms),
        gradient_bytes=sum(p.numel() * p.element_size() for p in parallel.parameters() if p.requires_grad),
        wire_bytes=None if state is None else state.wire_bytes // state.steps,
    )


def _wrap(
    workload: Workload, options: DDPBenchOptions, group: ReplicaGroup, world: World
) -> tuple[nn.Module, DDPState | None]:
    parallel, state = replicate(
        workload.model,
        replace(world, workers=group.size, group=group.process_group),
        options.compress,
        bucket_cap_mb=options.bucket_cap_mb,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
    )
    if options.hook is not None:
        parallel.register_comm_hook(*torch_hook(options.hook, group.process_group, powersgd_start=POWERSGD_START))
    return parallel, state
