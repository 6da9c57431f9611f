"""The engine of a run: what its settings make of a model on this worker."""

from __future__ import annotations

from thinpipe.engines.engine import Engine
from thinpipe.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.engines.replica import ReplicaEngine
from thinpipe.engines.units import Meta, cut_model
from thinpipe.engines.world import World
from thinpipe.models.adapters import Adapted
from thinpipe.training.data import Facts
from thinpipe.training.running import Running
from thinpipe.training.settings import Settings
from thinpipe.workloads.task import Task


def make_engine(
    adapted: Adapted, task: Task, settings: Settings, running: Running, world: World, facts: Facts
) -> Engine:
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
