"""The profile of a model: what each unit computes, keeps and sends for a microbatch of any size.

Operations and tensors are known from the model's code, times only once they are measured (``calibration``). A profile
is JSON in the records of plans, so that a later plan need not measure again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from thinpipe.codecs.integers import INTEGERS
from thinpipe.links.message import CHECKSUM_BYTES
from thinpipe.links.registry import link_codec
from thinpipe.links.slot import Slot
from thinpipe.system.tensors import dtype_name, dtype_named
from thinpipe.train.engines.units import Meta, Units

Points = Sequence[tuple[float, float]]
# What autograd keeps of a unit, in sizes of its output, until it is measured: that of a block of Llama with its
# normalizations, queries, keys, values and the four tensors of its feed-forward layer.
_KEPT_OUTPUTS = 20.0


def at(points: Points, size: float) -> float:
    """Return the value of a curve at a size: linear between measured points, proportional below and above."""
    sizes, values = zip(*sorted(points), strict=True)
    if len(points) > 1 and size > sizes[-1]:
        slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
        return float(max(values[-1] + slope * (size - sizes[-1]), values[-1]))
    if size < sizes[0] or len(points) == 1:
        return float(values[0] * size / sizes[0])
    return float(np.interp(size, sizes, values))


@dataclass(frozen=True, kw_only=True)
class TensorProfile:
    """A tensor that crosses a link if the model is cut behind its unit."""

    shape: tuple[int, ...]  # of one microbatch without its first dimension, if that is its samples
    dtype: str
    has_gradient: bool
    is_batched: bool = True  # the first dimension is that of samples

    def slot(self, samples: int) -> Slot:
        shape = (samples, *self.shape) if self.is_batched else self.shape
        return Slot(torch.Size(shape), dtype_named(self.dtype))


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """The cost of one unit; times are by the number of samples of a microbatch."""

    name: str
    flops: float  # forward, of one sample
    parameters: int
    trained: int
    kept_bytes: float  # of one sample from forward to backward, outputs included
    outputs: tuple[TensorProfile, ...]
    largest_bytes: float = 0.0  # of one sample: the largest tensor that is kept
    has_gradient: bool = True  # something up to here is trained
    forward_ms: Points = ()  # measured; empty: operations count
    backward_ms: Points = ()

    @property
    def backward_flops(self) -> float:
        """Operations of the backward of one sample: for the gradients of inputs and of trained parameters."""
        return self.flops * (self.has_gradient + (self.trained > 0 and self.has_gradient))


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The units of a model, and its data."""

    name: str
    units: tuple[UnitProfile, ...]
    unit_of_speed: str = "samples"  # what a sample counts in
    per_sample: int = 1  # tokens of a sample
    train_samples: int | None = None  # of an epoch
    element_bytes: int = 4
    optimizer_bytes: int = 0  # per trained parameter, in addition to its gradient
    is_tied: bool = False  # the first and the last unit share parameters
    # Measured on one machine: ms of an action apart from its module, and of a step apart from all actions.
    action_ms: float | None = None
    step_ms: float = 0.0
    update_ms: float | None = None  # of all trained parameters together
    replica_ms: Points = ()  # a step of one process by its samples, less the update
    slowdown: Sequence[float] = ()  # of units while one, two, ... workers on this machine compute
    crowded_action_ms: Sequence[float] = ()  # of an action, in addition, with one, two, ... workers on this machine
    codecs: Mapping[str, Mapping[str, Points]] = field(default_factory=dict)  # spec -> encode, decode: ms by bytes
    spread: float = 0.0  # relative standard deviation of repeated measurements

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> ModelProfile:
        units = tuple(
            UnitProfile(
                **{
                    **unit,
                    "outputs": tuple(TensorProfile(**{**t, "shape": tuple(t["shape"])}) for t in unit["outputs"]),
                }
            )
            for unit in facts["units"]
        )
        return ModelProfile(**{**facts, "units": units})

    def crossing(self, cut: int) -> tuple[TensorProfile, ...]:
        """Return the tensors between unit ``cut`` - 1 and unit ``cut``."""
        return self.units[cut - 1].outputs


def profile_units(units: Units, inputs: Sequence[Meta], *, amp: bool = False, **facts: Any) -> ModelProfile:
    """Return the profile of a model from its code, for microbatches like ``inputs``; nothing is measured."""
    samples = inputs[0].shape[0]
    traced = units.traced(tuple(inputs), amp=amp, device=torch.device("cpu"))
    found: list[UnitProfile] = []
    seen: set[int] = set()
    trained_before = False
    for unit, name, trace in zip(units.units, units.names, traced, strict=True):
        own = {id(each): each for each in unit.parameters() if id(each) not in seen}
        seen |= own.keys()
        trained = sum(each.numel() for each in own.values() if each.requires_grad)
        trained_before |= any(each.requires_grad for each in unit.parameters())
        found.append(
            UnitProfile(
                name=name,
                flops=trace.flops / samples,
                parameters=sum(each.numel() for each in own.values()),
                trained=trained,
                kept_bytes=_KEPT_OUTPUTS * sum(meta.bytes for meta in trace.outputs) / samples,
                outputs=tuple(_tensor(meta, samples, trained_before) for meta in trace.outputs),
                has_gradient=trained_before,
            )
        )
    first = {id(each) for each in units.units[0].parameters()}
    tied = len(units.units) > 1 and any(id(each) in first for each in units.units[-1].parameters())
    size = next((each.element_size() for unit in units.units for each in unit.parameters()), 4)
    return ModelProfile(units=tuple(found), is_tied=tied, element_bytes=size, **facts)


def _tensor(meta: Meta, samples: int, trained: bool) -> TensorProfile:
    batched = meta.shape[:1] == (samples,)
    return TensorProfile(
        shape=meta.shape[1:] if batched else meta.shape,
        dtype=dtype_name(meta.dtype),
        has_gradient=trained and meta.dtype.is_floating_point,
        is_batched=batched,
    )


def wire_bytes(spec: str, tensors: Sequence[TensorProfile], samples: int, chunks: int) -> int:
    """Return the bytes of one microbatch on a link, in the steady state of learned codecs."""
    codec, total = link_codec(spec), 0.0
    for each in tensors:
        slot = each.slot(samples)
        if slot.dtype in INTEGERS:
            total += slot.shape.numel() / 8 + CHECKSUM_BYTES  # masks, packed
            continue
        schedule = codec.basis_schedule(slot, chunks)
        total += codec.wire_formats(slot, chunks)[-1].wire_bytes + CHECKSUM_BYTES
        total += schedule.step_bytes / schedule.every / chunks
    return round(total)


def tensor_bytes(tensors: Sequence[TensorProfile], samples: int) -> int:
    """Return the bytes of the floats of one microbatch before encoding."""
    return sum(each.slot(samples).tensor_bytes for each in tensors if dtype_named(each.dtype).is_floating_point)


def stage_units(cuts: Sequence[int], units: int) -> list[tuple[int, int]]:
    """Return the first unit of each stage, and the one after its last."""
    return list(pairwise((0, *cuts, units)))
