"""Calibration: times of single parts, measured in one process that runs all stages through the codecs of a link.

    pass               stages          gives
    one a size         a unit each     forward and backward of every unit, by the size of microbatches
    one a pair         a unit each     encoding and decoding of what will travel, by bytes
    two of one size    two             what a stage costs in addition to its units, and an action and a step

Nothing is fitted to runs of several workers: links are measured by themselves (``network``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from thinpipe.train.engines.plan import kept_bytes
from thinpipe.train.engines.step import train_step
from thinpipe.train.engines.world import World
from thinpipe.train.tasks.task import Batch

_WARM_UP, _STEPS = 1, 4
_CHUNKS = 2  # of the batches that are measured

Spec = tuple[str, str]  # codecs of activations and of gradients


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
    runs = _Runs(profile, model, world, optimizer, amp)
    sizes = sorted(set(sizes))
    plain = [runs.measure(size, ("none", "none"), chunks=1 if size == sizes[-1] else _CHUNKS) for size in sizes]
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: {"encode": [], "decode": []})
    for codec in codecs:
        for size in {sizes[0], sizes[len(sizes) // 2]}:
            _add_codecs(found, codec, runs.measure(size, codec), profile)
    few, many = (runs.measure(sizes[0], ("none", "none"), stages=2, chunks=count) for count in (2, 8))
    # What remains of a step is the same for each of its actions, four a microbatch for two stages, and for the step.
    action_ms = max((many.rest - few.rest) / (4 * (many.chunks - few.chunks)), 0.0)
    step_ms = max(few.rest - 4 * few.chunks * action_ms, 0.0)
    # Units that are stages of their own take longer than those of one stage.
    alone = plain[0]
    extra = (sum(alone.forward) + sum(alone.backward) - sum(few.forward) - sum(few.backward)) / 2
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
        codecs={spec: {name: _mean_by_size(points) for name, points in each.items()} for spec, each in found.items()},
        spread=float(np.median([each.spread for each in plain])),
    )


class _Runs:
    """Passes of one model in this process."""

    def __init__(self, profile: ModelProfile, model: PlannedModel, world: World, optimizer: Any, amp: bool) -> None:
        self._profile, self._model, self._world, self._optimizer, self._amp = profile, model, world, optimizer, amp
        self.kept: list[float] = []  # by unit, of one sample

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

    def _engine(self, samples: int, codec: Spec, stages: int, chunks: int) -> tuple[PipelineEngine, Batch]:
        units, inputs = self._model.cut(samples, amp=self._amp)
        forward, backward = codec
        cutting = Cutting(layout="linear", order="gpipe", chunks=chunks, in_process=stages)
        links = Links(forward=link_codec(forward).immediate_spec, backward=backward)
        engine = PipelineEngine(units, inputs, cutting, links, self._world, amp=self._amp, make_loss=_TimedLoss)
        rows = torch.arange(samples * chunks) % len(self._model.batch.labels)
        parts = [part[rows] for part in (*self._model.batch.inputs, self._model.batch.labels)]
        if not self.kept:
            self.kept = [each / samples for each in _kept(engine, parts[:-1], samples)]
        return engine, Batch(inputs=tuple(parts[:-1]), labels=parts[-1])

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


def _kept(engine: PipelineEngine, inputs: Sequence[Tensor], samples: int) -> list[float]:
    """Return the bytes that each unit keeps of a microbatch from forward to backward, its outputs included."""
    found = []
    with torch.autocast(engine.world.device.type, dtype=torch.bfloat16, enabled=engine._amp):
        for index in engine.stages:
            module, metas = engine.partition.modules[index], engine.partition.between[index]
            values = [meta.zeros(engine.world.device, gradient=index > 0) for meta in metas]
            given = engine.partition.model.side_inputs(module.asks, [part[:samples] for part in inputs])
            all_ = kept_bytes(module, values, given, recompute=False)
            found.append(float(all_ - sum(meta.bytes for meta in metas)))
    return found


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


def _with_times(unit: UnitProfile, index: int, passes: Sequence[Pass], per_unit: float, kept: float) -> UnitProfile:
    """Return a unit with its times at every size, less what it costs to be a stage of its own."""
    is_last = index == len(passes[0].forward) - 1
    forward = [(each.samples, max(each.forward[index] - per_unit, 0.0) + is_last * each.loss) for each in passes]
    backward = [(each.samples, max(each.backward[index] - per_unit, 0.0)) for each in passes]
    return replace(unit, forward_ms=forward, backward_ms=backward, kept_bytes=kept)


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
