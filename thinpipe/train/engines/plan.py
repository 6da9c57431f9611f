"""The plan of a run before its first step: stages of each worker, traffic per step, and memory of chunks in flight."""

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

from thinpipe.links.link_codec import LinkCodec
from thinpipe.links.message import checksum_bytes, is_packed, max_bytes
from thinpipe.links.slot import Slot
from thinpipe.pipeline.batchnorm import frozen_statistics
from thinpipe.pipeline.order import Action
from thinpipe.pipeline.partition import StageModule
from thinpipe.system.sizes import check_fits
from thinpipe.train.engines.world import World


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One stage: the worker that has it, its units and its parameter counts."""

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


def check_stage_memory(modules: Iterable[nn.Module], world: World, saved_bytes: int = 0) -> None:
    """Raise OptionError if the weights and gradients of this worker's stages exceed the memory of its device.

    ``saved_bytes``: by quantization, once they are loaded.
    """
    parameters = {id(each): each for module in modules for each in module.parameters()}.values()
    needed = sum(each.numel() * each.element_size() * (1 + each.requires_grad) for each in parameters)
    what = f"the stages of worker {world.worker}, {sum(each.numel() for each in parameters):,} parameters,"
    check_fits(what, needed - saved_bytes, "take more workers, or give others more layers", device=str(world.device))


def counts(parameters: Iterable[nn.Parameter]) -> dict[str, int]:
    """Return the number of values in these parameters, and of trained ones, as two fields of a Holding."""
    sizes = [(each.numel(), each.requires_grad) for each in parameters]
    return {"parameters": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}


def holdings_of(modules: Sequence[StageModule], names: Sequence[str], workers: int) -> tuple[Holding, ...]:
    """Return the stages of a model; a parameter that two stages share is counted in the first."""
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
    """The traffic of one direction of one link per training step."""

    source: int  # stages
    target: int
    source_worker: int
    target_worker: int
    direction: Literal["forward", "backward"]
    spec: str  # of the codec
    shapes: tuple[tuple[int, ...], ...]  # of the tensors of one chunk
    tensor_bytes: int
    wire_bytes: int  # at most
    integer_bytes: int = 0  # part of it: masks and other integers, which may need fewer, as many bits as their range
    # In a step whose samples were never sent before (delta), or before the first PCA axes are known.
    first_wire_bytes: int | None = None
    first_steps: int = 0  # that send ``first_wire_bytes`` since PCA axes are not known yet
    first_bits: int = 0  # per value in those steps
    uncompressed: str | None = None  # why nothing is compressed although there is a codec
    steady_after: int = 0  # steps; afterwards axes are sent at their final, lowest rate
    learned_bytes: int = 0  # part of ``wire_bytes``: axes, sent every few steps; mean per step
    levels: tuple[int, ...] = ()  # bits per value that may be chosen in training, most first
    level_bytes: tuple[int, ...] = ()  # of a chunk at each of them


def plan_link(
    stages: tuple[int, int], slots: Sequence[Slot], codec: LinkCodec, *, chunks: int, workers: int, world: World
) -> LinkPlan:
    """Return the plan of the link from one stage to another; stage i is on worker i mod ``workers``."""
    source, target = stages
    formats = [codec.wire_formats(slot, chunks) for slot in slots]
    checksum = checksum_bytes(world.group, world.device)
    packed = [is_packed(slot.dtype, world.group, world.device) for slot in slots]

    def sizes(which: int) -> list[int]:
        """Return the bytes of all chunks' messages for each slot."""
        pairs = zip(formats, packed, strict=True)
        return [chunks * max_bytes(each[which].wire_bytes, packed=pack, checksum=checksum) for each, pack in pairs]

    schedules = [codec.basis_schedule(slot, chunks) for slot in slots]
    learned_bytes = sum(math.ceil(each.step_bytes / each.every) for each in schedules)
    return LinkPlan(
        source=source,
        target=target,
        source_worker=source % workers,
        target_worker=target % workers,
        direction="forward" if target > source else "backward",
        spec=codec.spec,
        shapes=tuple(tuple(slot.shape) for slot in slots),
        tensor_bytes=chunks * sum(slot.tensor_bytes for slot in slots),
        wire_bytes=sum(sizes(-1)) + learned_bytes,
        integer_bytes=sum(compress(sizes(-1), packed)),
        first_wire_bytes=sum(sizes(0)) if any(len(each) > 1 for each in formats) else None,
        first_steps=max((each.first_steps for each in schedules), default=0),
        first_bits=max((each.first_bits for each in schedules), default=0),
        uncompressed=codec.why_uncompressed(slots, chunks),
        steady_after=max((each.first_steps + each.every for each in schedules if each.step_bytes), default=0),
        learned_bytes=learned_bytes,
        levels=codec.levels,
        level_bytes=codec.level_bytes(slots, chunks),
    )


def kept_bytes(
    module: nn.Module, inputs: Sequence[Tensor], side_inputs: Mapping[str, Tensor], *, recompute: bool
) -> int:
    """Return the bytes that a stage keeps for a chunk until its backward; runs one chunk without changing state.

    With ``recompute`` only inputs and outputs are kept.
    """
    return sum(kept_storages(module, inputs, side_inputs, recompute=recompute))


def kept_storages(
    module: nn.Module, inputs: Sequence[Tensor], side_inputs: Mapping[str, Tensor], *, recompute: bool
) -> list[int]:
    """Return the bytes of every storage that a stage keeps for a chunk, as ``kept_bytes``."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with frozen_statistics(module), torch.random.fork_rng(), saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(*inputs, **side_inputs)
    outputs = output if isinstance(output, tuple) else (output,)
    stays = [*inputs, *outputs, *([] if recompute else saved)]
    own = {tensor.untyped_storage().data_ptr() for tensor in module.state_dict(keep_vars=True).values()}
    # By storage: a tensor is often saved several times, and as several views.
    sizes = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in stays)}
    return [size for place, size in sizes.items() if place not in own]


def peak_activation_bytes(orders: Mapping[int, Sequence[Action]], chunk_bytes: Mapping[int, int]) -> int:
    """Return the peak bytes that any worker keeps for chunks in flight, given the bytes per chunk of every stage."""
    most = 0
    for actions in orders.values():
        held = Counter[int]()
        for action in actions:
            held[action.stage] += 1 if action.kind == "F" else -1
            most = max(most, sum(count * chunk_bytes[stage] for stage, count in held.items()))
    return most
