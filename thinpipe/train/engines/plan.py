"""Who holds what of a model, what will travel in a step, and what stages keep meanwhile: known before the first one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from thinpipe.links.message import checksum_bytes, is_packed, most_bytes
from thinpipe.links.slot import Slot
from thinpipe.links.spec import encoding
from thinpipe.pipeline.batchnorm import frozen_statistics
from thinpipe.pipeline.order import Action
from thinpipe.pipeline.partition import StageModule
from thinpipe.train.engines.world import World


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One stage: who has it, and what is in it."""

    stage: int
    worker: int
    first_unit: int
    units: int
    unit_names: tuple[str, ...]
    parameters: int
    trained: int  # of them


def describe_held(holdings: Sequence[Holding], worker: int) -> str:
    """Return a line about the stages of one worker: their units and parameters."""
    ranges = []
    for held in (each for each in holdings if each.worker == worker):
        last = f" to {held.first_unit + held.units - 1} ({held.unit_names[0]} to {held.unit_names[-1]})"
        only = f" ({held.unit_names[0]})"
        ranges.append(f"{held.first_unit}{last if held.units > 1 else only}, {held.parameters:,} parameters")
    return f"worker {worker} holds units {' and '.join(ranges)}"


def counts(parameters: Iterable[nn.Parameter]) -> dict[str, int]:
    """How many values these hold, and how many of them are trained: two fields of a holding."""
    sizes = [(each.numel(), each.requires_grad) for each in parameters]
    return {"parameters": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}


def holdings_of(modules: Sequence[StageModule], names: Sequence[str], workers: int) -> tuple[Holding, ...]:
    """The stages of a model whose units have these names; what two stages share is the first one's."""
    holdings: list[Holding] = []
    known: set[int] = set()
    for stage, module in enumerate(modules):
        own = {id(each): each for each in module.parameters() if id(each) not in known}
        known |= own.keys()
        first = sum(each.units for each in holdings)
        holdings.append(
            Holding(
                stage=stage,
                worker=stage % workers,
                first_unit=first,
                units=len(module.units),
                unit_names=tuple(names[first : first + len(module.units)]),
                **counts(own.values()),
            )
        )
    return tuple(holdings)


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """One direction of one link, per step of training."""

    source: int  # stages
    target: int
    source_worker: int
    target_worker: int
    direction: Literal["forward", "backward"]
    spec: str  # of the codec
    shapes: tuple[tuple[int, ...], ...]  # of the tensors of one chunk
    tensor_bytes: int
    wire_bytes: int  # at most
    integer_bytes: int = 0  # of those, masks and other integers that may need fewer: as many bits as their range
    # Of a step whose samples were never sent before (delta), or before the first axes are known.
    first_wire_bytes: int | None = None
    first_steps: int = 0  # that send so much since axes are not known yet
    first_bits: int = 0  # per value in those steps
    uncompressed: str | None = None  # why nothing is compressed although there is a codec
    settled_after: int = 0  # steps: from then on axes travel as rarely as they will
    learned_bytes: int = 0  # of ``wire_bytes``, axes that travel every so many steps: their mean


def plan_link(
    stages: tuple[int, int], slots: Sequence[Slot], spec: str, *, chunks: int, workers: int, world: World
) -> LinkPlan:
    """The link from one stage to another, stage i on worker i mod ``workers``."""
    source, target = stages
    forms = [encoding(spec).forms(slot, chunks) for slot in slots]
    checksum = checksum_bytes(world.group, world.device)
    packed = [is_packed(slot.dtype, world.group, world.device) for slot in slots]

    def sizes(which: int) -> list[int]:
        """Of all chunks' messages for each slot."""
        pairs = zip(forms, packed, strict=True)
        return [chunks * most_bytes(form[which].wire_bytes, packed=each, checksum=checksum) for form, each in pairs]

    learning = [encoding(spec).learning(slot, chunks) for slot in slots]
    learned_bytes = sum(math.ceil(each.step_bytes / each.every) for each in learning)
    return LinkPlan(
        source=source,
        target=target,
        source_worker=source % workers,
        target_worker=target % workers,
        direction="forward" if target > source else "backward",
        spec=spec,
        shapes=tuple(tuple(slot.shape) for slot in slots),
        tensor_bytes=chunks * sum(slot.tensor_bytes for slot in slots),
        wire_bytes=sum(sizes(-1)) + learned_bytes,
        integer_bytes=sum(compress(sizes(-1), packed)),
        first_wire_bytes=sum(sizes(0)) if any(len(form) > 1 for form in forms) else None,
        first_steps=max((each.first_steps for each in learning), default=0),
        first_bits=max((each.first_bits for each in learning), default=0),
        uncompressed=encoding(spec).uncompressed(slots, chunks),
        settled_after=max((each.first_steps + each.every for each in learning if each.step_bytes), default=0),
        learned_bytes=learned_bytes,
    )


def kept_bytes(module: nn.Module, inputs: Sequence[Tensor], beside: Mapping[str, Tensor], *, recompute: bool) -> int:
    """Run a chunk through a stage as in training, which changes nothing, and count what stays.

    With ``recompute`` what is between inputs and outputs does not.
    """
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with frozen_statistics(module), torch.random.fork_rng(), saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(*inputs, **beside)
    outputs = output if isinstance(output, tuple) else (output,)
    stays = [*inputs, *outputs, *([] if recompute else saved)]
    own = {tensor.untyped_storage().data_ptr() for tensor in module.state_dict(keep_vars=True).values()}
    # By memory: a tensor is often saved several times, and as several views.
    sizes = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in stays)}
    return sum(size for place, size in sizes.items() if place not in own)


def most_kept(orders: Mapping[int, Sequence[Action]], chunk_bytes: Mapping[int, int]) -> int:
    """The most that any worker keeps at once, where ``chunk_bytes`` are those of a chunk for every stage."""
    most = 0
    for actions in orders.values():
        held = Counter[int]()
        for action in actions:
            held[action.stage] += 1 if action.kind == "F" else -1
            most = max(most, sum(count * chunk_bytes[stage] for stage, count in held.items()))
    return most
