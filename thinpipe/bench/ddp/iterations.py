"""The iteration time of DistributedDataParallel: every model on every group of replicas, in one launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinpipe.bench.ddp.groups import Group, Meeting, make_groups
from thinpipe.bench.ddp.rows import COLUMNS, KIND, Sample, make_row
from thinpipe.bench.ddp.settings import DTYPES, POWERSGD_START, Settings
from thinpipe.bench.models import Shapes, Workload, build, check_model
from thinpipe.ddp import DDPState, ddp_hook, ddp_state
from thinpipe.measure.environment import environment, gpu_topology
from thinpipe.measure.meter import time_iterations
from thinpipe.measure.record import Record, Row

_TORCH_HOOKS: dict[str, Callable[[dist.ProcessGroup | None], tuple[Any, Any]]] = {
    "fp16": lambda group: (group, default_hooks.fp16_compress_hook),
    "bf16": lambda group: (group, default_hooks.bf16_compress_hook),
    "powersgd": lambda group: (PowerSGDState(group, start_powerSGD_iter=POWERSGD_START), powerSGD_hook),
}


def measure_iterations(
    settings: Settings, command: Sequence[str], on_start: Callable[[Record], None], on_row: Callable[[Row], None]
) -> Record | None:
    """Measure on this replica, while the others do the same; the record on the first, None elsewhere.

    The first replica hears of the record before its rows are known, and of every row as it is.
    """
    device, backend = find_device(settings.device), settings.backend or default_backend(settings.device)
    meeting = Meeting()
    groups = make_groups(meeting, backend, "G" if device.type == "cuda" else "C")
    first = dist.get_rank() == 0
    config = {
        **asdict(settings),
        "command": list(command),
        "backend": backend,
        "replicas": dist.get_world_size(),
        "machines": 1 + max(meeting.gather(int(os.environ["GROUP_RANK"]))),
    }
    facts = {
        **environment(),
        "libraries": list(dict.fromkeys(map(check_model, settings.models))),
        "cuda": torch.version.cuda,
        "topology": gpu_topology() if first else None,
    }
    record = Record(kind=KIND, config=config, columns=COLUMNS, rows=(), environment=facts)
    if first:
        on_start(record)
    rows = []
    for model in settings.models:
        for group in groups:
            mine = _measure(model, settings, group, device) if dist.get_rank() < group.size else None
            told = meeting.gather(None if mine is None else asdict(mine))[: group.size]  # here the others wait
            if first:
                samples = [Sample(**each) for each in told]
                rows.append(make_row(model, group, settings.batch_size, device.type, samples))
                on_row(rows[-1])
    return replace(record, rows=tuple(rows)) if first else None


def default_backend(device: str) -> str:
    return "nccl" if device == "cuda" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"


def find_device(kind: str) -> torch.device:
    """The device of this replica; replicas share GPUs where there are too few."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _measure(model: str, settings: Settings, group: Group, device: torch.device) -> Sample:
    shapes = Shapes(batch_size=settings.batch_size, image_size=settings.image_size, tokens=settings.tokens)
    workload = build(model, shapes, dtype=DTYPES[settings.dtype], device=device)
    parallel, state = _wrap(workload, settings, group, device) if group.ddp else (workload.model, None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)

    def iterate() -> None:
        optimizer.zero_grad()
        workload.loss(parallel(*workload.inputs)).backward()
        optimizer.step()

    for _ in range(settings.warmup):
        iterate()
    if group.ddp:
        dist.barrier(group.process_group, device_ids=None if device.index is None else [device.index])
    times = time_iterations(iterate, iterations=settings.iterations, device=device)
    return Sample(
        samples_s=tuple(sample / 1e3 for sample in times.samples_ms),
        gradient_bytes=sum(p.numel() * p.element_size() for p in parallel.parameters() if p.requires_grad),
        wire_bytes=None if state is None else state.wire_bytes // state.steps,
    )


def _wrap(
    workload: Workload, settings: Settings, group: Group, device: torch.device
) -> tuple[DistributedDataParallel, DDPState | None]:
    parallel = DistributedDataParallel(
        workload.model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group.process_group,
        bucket_cap_mb=settings.bucket_cap_mb,
        static_graph=settings.static_graph,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
    )
    state = None
    if settings.compress is not None:
        state = ddp_state(settings.compress, process_group=group.process_group)
        parallel.register_comm_hook(state, ddp_hook)
    elif settings.hook is not None:
        parallel.register_comm_hook(*_TORCH_HOOKS[settings.hook](group.process_group))
    return parallel, state
