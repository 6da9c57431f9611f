"""The model of a run on one worker: built, adapted, cut into units, and given to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from thinpipe.comm.group import DisagreementError
from thinpipe.comm.membership import print_remote
from thinpipe.train.checkpoints.folder import companions_of
from thinpipe.train.data import Facts
from thinpipe.train.engines.compiled import compile_blocks
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.loss import Loss
from thinpipe.train.engines.partitioned_model import CacheOptions
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.plan import describe_held
from thinpipe.train.engines.preference import BETA, PreferenceLoss
from thinpipe.train.engines.replica import ReplicaEngine
from thinpipe.train.engines.units import Meta, cut_model
from thinpipe.train.engines.world import SetupError, World
from thinpipe.train.export import Export, Exporter
from thinpipe.train.models.adapters import adapt
from thinpipe.train.models.packed import INPUTS
from thinpipe.train.models.remote import all_loaded
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.models.weights import LoadWeights
from thinpipe.train.recovery.keeper import Keeper
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import Task
from thinpipe.train.versions import torch_minor
from thinpipe.version import __version__


class Prepared(NamedTuple):
    """This worker's part of the model, its exporter if the run exports, and the facts to rebuild the model from."""

    engine: Engine
    exporter: Exporter | None
    rebuild: dict[str, Any]


def prepare(
    task: Task,
    settings: Settings,
    running: RunOptions,
    world: World,
    facts: Facts,
    kept: Mapping[str, bytes],
    adapter: SavedAdapter | None = None,
    *,
    keeper: Keeper | None = None,
) -> Prepared:
    """Build the model and return this worker's part of it.

    The full model is released on return: it need not fit in a worker's memory.
    """

    def build() -> nn.Module:
        torch.manual_seed(settings.seed)  # the same weights on all workers, for all parallelism
        return task.build(facts.shape, settings.source)

    def export() -> Export | None:
        if running.export is None or not world.is_client:
            return None
        return Export.of(running.export, model, task, settings, kept)

    model = world.together(build)
    rebuild = {"shape": asdict(facts.shape), "tensors": len(model.state_dict())}
    exported = world.together(export)  # from the model as it was built: cutting it changes its config
    adapted = world.together(
        lambda: (
            adapt(model, settings.adapters, settings.freeze, settings.seed)
            if adapter is None
            else adapter.put_on(model)
        )
    )
    fill = adapted.loader(task.weight_loader(settings.source, settings.seed))
    if keeper is not None:
        fill = keeper.loader(fill)
    engine = _make_engine(adapted.model, fill, task, settings, running, world, facts)
    if settings.compile:
        world.together(lambda: compile_blocks([stage.module for stage in engine.stages.values()]))
    world.together(all_loaded)
    print_remote(describe_held(engine.holdings, world.worker))
    if running.export is None:
        return Prepared(engine, None, rebuild)
    if exported is not None and adapted.config is not None and not running.merge:
        exported = exported.of_adapter(adapted)
    exporter = world.together(lambda: Exporter(engine, exported, model, with_adapters=running.merge))
    return Prepared(engine, exporter, rebuild)


def _make_engine(
    adapted: nn.Module,
    fill: LoadWeights | None,
    task: Task,
    settings: Settings,
    running: RunOptions,
    world: World,
    facts: Facts,
) -> Engine:
    """Return the engine of this worker for a model and settings."""
    chunk = tuple(Meta((settings.chunk_size, *meta.shape[1:]), meta.dtype) for meta in facts.inputs)
    names = {"names": INPUTS} if facts.shape.packed else {}
    model = world.together(lambda: cut_model(adapted, chunk, fill, amp=settings.amp, **names))
    model = replace(model, quantized=settings.quantize is not None)
    make_loss = partial(PreferenceLoss, beta=settings.dpo_beta or BETA) if task.has_pairs else Loss
    if settings.parallel != "pipeline":
        return ReplicaEngine(
            model,
            world,
            chunks=settings.chunks,
            compress=settings.compress_backward,
            error_feedback=settings.error_feedback,
            seed=settings.seed,
            amp=settings.amp,
            make_loss=make_loss,
        )
    cutting = Cutting(
        layout=settings.layout,
        order=settings.schedule,
        chunks=settings.chunks,
        client_layers=settings.client_layers,
        cuts=settings.cuts,
        memory_limit=running.memory_limit,
        in_process=settings.workers if running.in_process else None,
    )
    links = Links(
        forward=settings.compress_forward,
        backward=settings.compress_backward,
        seed=settings.seed,
        shaping=running.link,
        cache=CacheOptions(
            samples=facts.train_samples,
            validation_samples=facts.validation_samples,
            directory=running.activation_cache,
            limit=running.activation_cache_limit,
        )
        if facts.repeats and settings.epochs > 1
        else None,
    )
    engine = world.together(
        lambda: PipelineEngine(
            model, chunk, cutting, links, world, amp=settings.amp, recompute=settings.recompute, make_loss=make_loss
        )
    )
    world.together(engine.reserve_cache)
    return engine


def check_agreement(facts: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return the facts that any worker has given; raise SetupError if workers, or their versions, differ in one."""
    versions = {"torch version": torch_minor(), "thinpipe version": __version__}
    try:
        return world.control.agree({**facts, **versions})
    except DisagreementError as error:
        raise SetupError(str(error)) from None


def saved_companions(settings: Settings, run: Path | None) -> Path | None:
    """Return the folder where an earlier run from scratch saved its tokenizer, if this worker sees it."""
    return None if run is None or settings.config is None else companions_of(run)
