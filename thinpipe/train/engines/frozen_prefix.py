"""The frozen prefix of a pipeline: first stages whose outputs are the same in every epoch, and are sent once.

Its stages have no trained parameters, draw no random numbers (dropout) and collect no statistics (batch norm); the task
promises that the inputs of a sample are always the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from thinpipe.links.registry import link_codec, sent_once
from thinpipe.links.slot import Slot
from thinpipe.options import named
from thinpipe.pipeline.batchnorm import frozen_statistics, tracking_norms
from thinpipe.pipeline.partition import StageModule
from thinpipe.system.sizes import size_text
from thinpipe.train.engines.partitioned_model import Links, PartitionedModel
from thinpipe.train.engines.units import Meta
from thinpipe.train.engines.world import World


class FrozenPrefix(NamedTuple):
    """The stages before ``before``, whose outputs that stage keeps if it ``keeps`` any."""

    before: int | None = None  # None: no link sends anything once
    keeps: bool = False
    notice: str | None = None  # for the user


def find_prefix(
    partition: PartitionedModel, mine: Mapping[int, StageModule], links: Links, world: World, *, amp: bool
) -> FrozenPrefix:
    """Return the frozen prefix of a run. A collective; ``mine``: the stages of this worker."""
    trained = [holding.stage for holding in partition.holdings if holding.trained]
    if links.cache is None or not trained or trained[0] == 0:
        return FrozenPrefix()
    before, cache = trained[0], links.cache

    def reason() -> str | None:
        here = [
            _why_changing(partition, mine[index], index, world, amp=amp) for index in sorted(mine) if index < before
        ]
        unkept = [_why_unkept(links.forward, metas) for metas in partition.between[1 : before + 1]]
        return next((each for each in [*here, *unkept] if each is not None), None)

    # Together: another worker may have failed before this point.
    place = None if cache.directory is None else str(cache.directory)
    offers = world.gather([world.together(reason), cache.limit, place])
    what = f"activations of the frozen layers, up to stage {before - 1}"
    reasons = [each for each, *_ in offers if each is not None]
    if reasons:
        return FrozenPrefix(notice=f"{what}, are sent in every epoch: {reasons[0]}")
    keeper = before % world.workers
    needed, (_, limit, place) = _kept_bytes(links, partition.between[before]), offers[keeper]
    if needed > limit:
        why = f"to keep them takes {size_text(needed)}, and {{activation_cache_limit}} allows {size_text(limit)}"
        return FrozenPrefix(before, notice=named(f"{what}, are sent in every epoch: {why}") if limit else None)
    where = "memory" if place is None else place
    return FrozenPrefix(before, True, f"{what}, are sent once: worker {keeper} keeps {size_text(needed)} in {where}")


def _why_changing(
    partition: PartitionedModel, module: StageModule, index: int, world: World, *, amp: bool
) -> str | None:
    """Return why the outputs of a frozen stage for a sample differ from step to step; None if they do not."""
    if tracking_norms(module):
        return "batch norm depends on the batch"
    device, was_training = world.device, module.training
    state = torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state
    side_inputs = partition.model.side_inputs(module.asks, [meta.zeros(device) for meta in partition.between[0]])
    module.train()
    with frozen_statistics(module), torch.no_grad(), torch.random.fork_rng():
        before = state()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
            module(*(meta.zeros(device) for meta in partition.between[index]), **side_inputs)
        is_random = not torch.equal(before, state())
    module.train(was_training)
    return "they have dropout" if is_random else None


def _why_unkept(spec: str, metas: Sequence[Meta]) -> str | None:
    """Return why the tensors of a chunk between two stages cannot be kept by sample; None if they can."""
    rows = metas[0].shape[0] if metas and metas[0].shape else 0
    for slot in map(Slot.of, metas):
        if slot.shape[:1] != (rows,):
            return f"{slot} has no dimension of samples"
        if sent_once(spec).wire_formats(slot)[0].raw and not link_codec(spec).wire_formats(slot)[0].raw:
            return f"each sample is encoded by itself, and a sample of {slot} is too small for {spec}"
    return None


def _kept_bytes(links: Links, metas: Sequence[Meta]) -> int:
    """Return the bytes that the stage after the prefix keeps."""
    assert links.cache is not None
    samples = links.cache.samples + links.cache.validation_samples
    wires = [(slot.shape[0], sent_once(links.forward).wire_formats(slot)[0]) for slot in map(Slot.of, metas)]
    return sum(samples * (each.wire_bytes // rows) for rows, each in wires)
