"""Evaluations leave nothing behind: the memory of a worker is the same after many of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.train.toy import FEATURES, ToyTask, world_in
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.units import Meta
from thinpipe.train.tasks.task import Source

ROWS, CHUNKS, EVALUATIONS = 3072, 3, 40


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown_bytes(group: Any, spec: str) -> int:
    """How much this worker has grown by many evaluations, each of which receives 1 MiB a chunk at every link."""
    task = ToyTask()
    _, shape = task.load(Source())
    cutting = Cutting(layout="client-server", order="gpipe", chunks=CHUNKS)
    links = Links(forward=spec, backward="none")
    chunk = (Meta((ROWS // CHUNKS, FEATURES), torch.float32),)
    engine = PipelineEngine(task.build(shape, Source()), chunk, cutting, links, world_in(group))
    inputs = (torch.randn(ROWS, FEATURES),) if engine.reads_inputs else None
    for _ in range(5):
        engine.predict(inputs)
    before = resident_bytes()
    for _ in range(EVALUATIONS):
        engine.predict(inputs)
    return resident_bytes() - before


@pytest.mark.parametrize("spec", ["none", "tile:8", "sort:8", "axes:2"])
def test_memory_stays_the_same_over_evaluations(pool: Pool, spec: str) -> None:
    for grown in pool.run(grown_bytes, 2, spec):
        assert grown < EVALUATIONS * CHUNKS * (1 << 20) / 8  # a tensor kept of each chunk would be eight times that
