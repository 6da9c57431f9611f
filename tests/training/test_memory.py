"""Evaluations leave nothing behind: the memory of a worker is the same after many of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.training.toy import FEATURES, ToyTask, place_in, settings_for
from thinpipe.training.pipeline_engine import PipelineEngine
from thinpipe.training.shapes import Meta

ROWS, CHUNKS, EVALUATIONS = 3072, 3, 40


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown_bytes(group: Any, spec: str) -> int:
    """How much this worker has grown by many evaluations, each of which receives 1 MiB a chunk at every link."""
    task = ToyTask()
    given = {"batch_size": ROWS, "chunks": CHUNKS, "compress_forward": spec, "compress_backward": "none"}
    settings = settings_for(task, group, **given)
    _, shape = task.load(settings.source)
    chunk = (Meta((ROWS // CHUNKS, FEATURES), torch.float32),)
    engine = PipelineEngine(task.build(shape, settings.source), chunk, settings, place_in(group), samples=ROWS)
    inputs = (torch.randn(ROWS, FEATURES),) if engine.reads_inputs else None
    for _ in range(5):
        engine.predict(inputs)
    before = resident_bytes()
    for _ in range(EVALUATIONS):
        engine.predict(inputs)
    return resident_bytes() - before


@pytest.mark.parametrize("spec", ["none", "tile:8", "sort:8", "delta(tile:2)"])
def test_memory_stays_the_same_over_evaluations(pool: Pool, spec: str) -> None:
    for grown in pool.run(grown_bytes, 2, spec):
        assert grown < EVALUATIONS * CHUNKS * (1 << 20) / 8  # a tensor kept of each chunk would be eight times that
