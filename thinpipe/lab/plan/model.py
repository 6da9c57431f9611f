"""The model of a plan: built as `thinpipe train` builds it, without its weights, and cut into units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from thinpipe.comm.group import Group
from thinpipe.lab.bench.models import Shapes, build_named, check_named
from thinpipe.lab.plan.profile import ModelProfile, profile_units
from thinpipe.train.data import read_data
from thinpipe.train.engines.units import Meta, Units, cut_model, meta_of
from thinpipe.train.engines.world import World
from thinpipe.train.models.adapters import adapt
from thinpipe.train.models.packed import INPUTS
from thinpipe.train.models.weights import LoadWeights
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.lm import TOKENS
from thinpipe.train.tasks.task import Batch
from thinpipe.train.tasks.tasks import task as find_task

_TRACED = 3  # samples of the microbatch that finds operations and tensors


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model that is to be trained, and its data: a batch of it if there is any."""

    name: str
    model: nn.Module
    load: LoadWeights | None
    batch: Batch
    packed: bool = False
    tokens: int | None = None
    train_samples: int | None = None

    def cut(self, samples: int, *, amp: bool) -> tuple[Units, tuple[Meta, ...]]:
        """Return the units, and the inputs of a microbatch of ``samples``."""
        inputs = tuple(replace(meta, shape=(samples, *meta.shape[1:])) for meta in meta_of(self.batch.inputs))
        names: dict[str, Any] = {"names": INPUTS} if self.packed else {}
        return cut_model(self.model, inputs, self.load, amp=amp, **names), inputs

    def rows(self, samples: int) -> Batch:
        """Return a batch of as many samples."""
        rows = torch.arange(samples) % len(self.batch.labels)
        return Batch(inputs=tuple(part[rows] for part in self.batch.inputs), labels=self.batch.labels[rows])

    def profile(self, settings: Settings) -> ModelProfile:
        """Return the profile without measured times."""
        units, inputs = self.cut(_TRACED, amp=settings.amp)
        return profile_units(
            units,
            inputs,
            amp=settings.amp,
            name=self.name,
            unit_of_speed="samples" if self.tokens is None else "tokens",
            per_sample=self.tokens or 1,
            train_samples=self.train_samples,
            optimizer_bytes=8 if settings.optimizer == "adamw" else 4 if settings.momentum else 0,
        )


def alone() -> World:
    """Return the world of a process that plans."""
    return World(worker=0, workers=1, device=torch.device("cpu"), control=Group(0, 1))


def planned_model(settings: Settings) -> PlannedModel:
    """Return the model of a run with these settings; a language model needs no data to be planned for."""
    source, name = settings.source, settings.model or settings.config or settings.task
    adapted = partial(adapt, lora=settings.adapters, frozen=settings.freeze, seed=settings.seed)
    if settings.task == "lm" and source.data is None:
        check_named(source)
        shapes = Shapes(batch_size=settings.batch_size, tokens=settings.tokens or TOKENS)
        model, batch, fill = build_named(source, shapes)
        made = adapted(model)
        return PlannedModel(
            name=name, model=made.model, load=made.loader(fill), batch=batch, tokens=settings.tokens or TOKENS
        )
    task, world = find_task(settings.task), alone()
    data, facts = read_data(task, settings, world)
    assert data is not None
    torch.manual_seed(settings.seed)
    made = adapted(task.build(facts.shape, source))
    return PlannedModel(
        name=name,
        model=made.model,
        load=made.loader(task.weight_loader(source, settings.seed)),
        batch=data.train.batch(_first(settings.batch_size, len(data.train))),
        packed=facts.shape.packed,
        tokens=None if facts.shape.tokens is None else facts.inputs[0].shape[1],
        train_samples=facts.train_samples,
    )


def _first(count: int, there: int) -> torch.Tensor:
    return torch.arange(count) % there
