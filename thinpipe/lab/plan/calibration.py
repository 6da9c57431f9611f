"""Calibration: times of single parts, measured in one process that runs all stages through the codecs of a link.

    pass               stages          gives
    one a size         a unit each     forward and backward of every unit, by the size of microbatches
    one a pair         a unit each     encoding and decoding of what will travel, by bytes
    two of one size    two             what a stage costs in addition to its units, and an action and a step
    one a small size   no pipeline     a step of one process

Links are measured by themselves (``network``), and so is what workers on one machine cost each other (``crowding``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinpipe.lab.plan.model import PlannedModel
from thinpipe.lab.plan.profile import ModelProfile, Points, TensorProfile, UnitProfile, tensor_bytes
from thinpipe.links.registry import link_codec
from thinpipe.train.engines.loss import Loss
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.plan import kept_storages
from thinpipe.train.engines.replica import ReplicaEngine
from thinpipe.train.engines.step import train_step
from thinpipe.train.engines.world import World
from thinpipe.train.tasks.task import Batch

_WARM_UP, _STEPS = 1, 4
_REPLICA_STEPS = 10  # their times are extrapolated
_CHUNKS = 2  # of the batches with codecs

Spec = tuple[str, str]  # codecs of activations and of gradients
Memory = tuple[float, float]  # bytes of one sample that a unit keeps: all, and the largest tensor


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Medians of one pass, in ms: of one microbatch, but for those of a step."""

    samples: int
    chunks: int
    forward: tuple[float, ...]  # by stage
    backward: tuple[float, ...]
    loss: float
    encode: Mapping[tuple[int, int], float]  # by link, from stage to stage
    decode: Mapping[tuple[int, int], float]
    update: float  # of a step
    rest: float  # of a step: neither modules nor loss, codecs or update
    spread: float  # relative standard deviation of the steps


class _TimedLoss(Loss):
    """A loss that measures its forward."""

    ms = 0.0

    def __call__(self, outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
        began = time.perf_counter()
        loss = super().__call__(outputs, labels)
        self.ms += (time.perf_counter() - began) * 1e3
        return loss


def calibrate(
    profile: ModelProfile,
    model: PlannedModel,
    world: World,
    *,
    sizes: Sequence[int],
    codecs: Sequence[Spec],
    optimizer: Any = torch.optim.SGD,
    amp: bool = False,
) -> ModelProfile:
    """Return the profile with the times of this machine; ``sizes`` are samples of microbatches. World: this process."""
    runs = Runs(profile, model, world, optimizer, amp)
    sizes = sorted(set(sizes))
    # As many microbatches as in training: one of two took longer than one of many.
    plain = [runs.measure(size, ("none", "none"), chunks=sizes[-1] // size) for size in sizes]
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: {"encode": [], "decode": []})
    for codec in codecs:
        for size in {sizes[0], sizes[len(sizes) // 2]}:
            _add_codecs(found, codec, runs.measure(size, codec), profile)
    most = max(sizes[-1] // sizes[0], 8)
    few, many = (runs.measure(sizes[0], ("none", "none"), stages=2, chunks=count) for count in (most // 4, most))
    # What remains of a step is the same for each of its actions, four a microbatch for two stages, and for the step.
    action_ms = max((many.rest - few.rest) / (4 * (many.chunks - few.chunks)), 0.0)
    step_ms = max(few.rest - 4 * few.chunks * action_ms, 0.0)
    # Units that are stages of their own take longer than those of one stage.
    single = plain[0]
    extra = (sum(single.forward) + sum(single.backward) - sum(many.forward) - sum(many.backward)) / 2
    per_unit = max(extra, 0.0) / max(len(profile.units) - 2, 1)
    units = tuple(
        _with_times(unit, index, plain, per_unit, runs.kept[index]) for index, unit in enumerate(profile.units)
    )
    return replace(
        profile,
        units=units,
        action_ms=action_ms + per_unit,
        step_ms=step_ms,
        update_ms=float(np.median([each.update for each in plain])),
        replica_ms=[(size, runs.replica_ms(size)) for size in {max(sizes[-1] // 2, 1), max(3 * sizes[-1] // 4, 1)}],
        codecs={spec: {name: _mean_by_size(points) for name, points in each.items()} for spec, each in found.items()},
        spread=float(np.median([each.spread for each in plain])),
    )


class Runs:
    """Passes of one model in this process."""

    def __init__(self, profile: ModelProfile, model: PlannedModel, world: World, optimizer: Any, amp: bool) -> None:
        self._profile, self._model, self._world, self._optimizer, self._amp = profile, model, world, optimizer, amp
        self.kept: list[Memory] = []  # by unit

    def measure(self, samples: int, codec: Spec, *, stages: int | None = None, chunks: int = _CHUNKS) -> Pass:
        """Return the medians of a pass over ``stages`` stages, by default a unit each."""
        engine, batch = self._engine(samples, codec, stages or len(self._profile.units), chunks)
        made = self._optimizer(list(engine.parameters()), lr=1e-6)
        first = max((each.first_steps for each in engine.link_plans()), default=0)  # of learned codecs
        engine.warm_up()
        taken: list[dict[str, Any]] = []
        for step in range(max(_WARM_UP, first) + _STEPS):
            before = _clocks(engine)
            began = time.perf_counter()
            train_step(engine, made, batch, step=step + 1)
            whole = (time.perf_counter() - began) * 1e3
            taken.append({"whole": whole, **_difference(_clocks(engine), before)})
        return self._medians(taken[-_STEPS:], samples, chunks)

    def _replica(self, samples: int) -> tuple[ReplicaEngine, Any, Batch]:
        engine = ReplicaEngine(self._model.cut(samples, amp=self._amp)[0], self._world, amp=self._amp)
        return engine, self._optimizer(list(engine.parameters()), lr=1e-6), self._model.rows(samples)

    def replica_ms(
        self, samples: int, *, steps: int = _REPLICA_STEPS, begin: Callable[[], object] = lambda: None
    ) -> float:
        """Return the time of a step of one process without a pipeline, less the update; call ``begin`` before."""
        engine, made, batch = self._replica(samples)
        taken = []
        for step in range(_WARM_UP + steps):
            if step == _WARM_UP:
                begin()
            updated, began = engine.updates.total_ms(), time.perf_counter()
            train_step(engine, made, batch, step=step + 1)
            whole = (time.perf_counter() - began) * 1e3
            taken.append(whole - engine.updates.total_ms() + updated)
        return float(np.median(taken[_WARM_UP:]))

    def _engine(self, samples: int, codec: Spec, stages: int, chunks: int) -> tuple[PipelineEngine, Batch]:
        units, inputs = self._model.cut(samples, amp=self._amp)
        forward, backward = codec
        cutting = Cutting(layout="linear", order="gpipe", chunks=chunks, in_process=stages)
        links = Links(forward=link_codec(forward).immediate_spec, backward=backward)
        engine = PipelineEngine(units, inputs, cutting, links, self._world, amp=self._amp, make_loss=_TimedLoss)
        batch = self._model.rows(samples * chunks)
        if not self.kept:
            self.kept = _kept(engine, batch.inputs, samples)
        return engine, batch

    def _medians(self, taken: Sequence[Mapping[str, Any]], samples: int, chunks: int) -> Pass:
        def median(name: str) -> Any:
            first = taken[0][name]
            if isinstance(first, dict):
                return {key: float(np.median([each[name][key] for each in taken])) / chunks for key in first}
            return float(np.median([each[name] for each in taken]))

        forward, backward, encode, decode = (median(name) for name in ("forward", "backward", "encode", "decode"))
        known = sum(sum(each.values()) for each in (forward, backward, encode, decode)) * chunks
        wholes = [each["whole"] for each in taken]
        return Pass(
            samples=samples,
            chunks=chunks,
            forward=tuple(forward.values()),
            backward=tuple(backward.values()),
            loss=median("loss") / chunks,
            encode=encode,
            decode=decode,
            update=median("update"),
            rest=median("whole") - known - median("loss") - median("update"),
            spread=float(np.std(wholes) / np.mean(wholes)),
        )


def _kept(engine: PipelineEngine, inputs: Sequence[Tensor], samples: int) -> list[Memory]:
    """Return the bytes that each unit keeps of a sample from forward to backward, its outputs included.

    And those of its largest tensor. The loss keeps as much as the last unit returns.
    """
    found = []
    with torch.autocast(engine.world.device.type, dtype=torch.bfloat16, enabled=engine._amp):
        for index in engine.stages:
            module, metas = engine.partition.modules[index], engine.partition.between[index]
            values = [meta.zeros(engine.world.device, gradient=index > 0) for meta in metas]
            given = engine.partition.model.side_inputs(module.asks, [part[:samples] for part in inputs])
            sizes = kept_storages(module, values, given, recompute=False)
            found.append(((sum(sizes) - sum(meta.bytes for meta in metas)) / samples, max(sizes, default=0) / samples))
    kept, largest = found[-1]
    return [*found[:-1], (kept + sum(meta.bytes for meta in engine.partition.between[-1]) / samples, largest)]


def _clocks(engine: PipelineEngine) -> dict[str, Any]:
    """Return all times so far, in ms."""
    stages = {stage.stage_index: stage.compute_ms() for stage in engine.training_stages}
    ends = [(end, end.counters()) for end in engine.links]
    loss = engine.loss
    assert isinstance(loss, _TimedLoss)
    return {
        "forward": {index: ms["forward"] for index, ms in stages.items()},
        "backward": {index: ms["backward"] for index, ms in stages.items()},
        "encode": {(end.source, end.target): each.encode_ms for end, each in ends if end.route.sends},
        "decode": {(end.source, end.target): each.decode_ms for end, each in ends if not end.route.sends},
        "loss": loss.ms,
        "update": engine.updates.total_ms(),
    }


def _difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {key: ms - before[name].get(key, 0.0) for key, ms in value.items()}
        if isinstance(value, dict)
        else value - before[name]
        for name, value in after.items()
    }


def _with_times(unit: UnitProfile, index: int, passes: Sequence[Pass], per_unit: float, memory: Memory) -> UnitProfile:
    """Return a unit with its times at every size, less what it costs to be a stage of its own."""
    is_last = index == len(passes[0].forward) - 1
    forward = [(each.samples, max(each.forward[index] - per_unit, 0.0) + is_last * each.loss) for each in passes]
    backward = [(each.samples, max(each.backward[index] - per_unit, 0.0)) for each in passes]
    return replace(unit, forward_ms=forward, backward_ms=backward, kept_bytes=memory[0], largest_bytes=memory[1])


def _add_codecs(found: Any, codec: Spec, one: Pass, profile: ModelProfile) -> None:
    """Add the times of a pass to those of its two codecs, by the bytes of the tensors."""
    for (source, target), ms in one.encode.items():
        is_forward = target > source
        tensors: tuple[TensorProfile, ...] = profile.crossing(max(source, target))
        if not is_forward:
            tensors = tuple(each for each in tensors if each.has_gradient)
        size = tensor_bytes(tensors, one.samples)
        times = found[codec[0] if is_forward else codec[1]]
        times["encode"].append((size, ms))
        times["decode"].append((size, one.decode[source, target]))


def _mean_by_size(points: Points) -> Points:
    """Return one point for each size: the mean."""
    by_size: dict[float, list[float]] = defaultdict(list)
    for size, ms in points:
        by_size[size].append(ms)
    return [(size, float(np.mean(each))) for size, each in sorted(by_size.items())]
