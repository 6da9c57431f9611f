"""A model cut into the stages of a pipeline: modules, the tensors between them, the traffic of links, and the order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from thinpipe.links.registry import link_codec, sent_once
from thinpipe.links.slot import Slot
from thinpipe.options import OptionError
from thinpipe.pipeline.order import Order, make_order
from thinpipe.pipeline.partition import Layout, UnitCost, choose_cuts, cut_units, stage_count
from thinpipe.system.sizes import size_text
from thinpipe.train.engines.latency_model import choose_order
from thinpipe.train.engines.plan import LinkPlan, holdings_of, kept_bytes, peak_activation_bytes, plan_link
from thinpipe.train.engines.units import Meta, Units, check_private, check_shared, costs_of
from thinpipe.train.engines.world import World
from thinpipe.train.shaping import Shaping


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """Options for cutting model and batch, and the order in which the pieces are computed."""

    layout: Layout
    order: Order
    chunks: int  # of a batch
    client_layers: tuple[int, int] | None = None  # units of the client at both ends; None: chosen by costs
    cuts: tuple[int, ...] | None = None  # units at which stages begin; None: chosen
    costs: Sequence[UnitCost] | None = None  # of the units; None: their operations are counted
    memory_limit: int | None = None  # maximum bytes that a worker keeps of chunks in flight
    in_process: int | None = None  # number of workers whose stages all run here; None: only its own


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options of the activation cache on this machine, for samples that are the same in every epoch."""

    samples: int  # to train on
    validation_samples: int
    directory: Path | None = None  # None: in memory
    limit: int = 4 << 30  # bytes; 0: keep nothing


@dataclass(frozen=True, kw_only=True)
class Links:
    """Options of the links: codecs, their state, and the shaping."""

    forward: str
    backward: str
    seed: int = 0  # of codecs that round at random
    shaping: Shaping | None = None  # rate, delay and loss, if known
    cache: CacheOptions | None = None  # None: activations are sent in every step


class PartitionedModel:
    """The stages of a model that is built identically on every worker."""

    def __init__(
        self, model: Units, chunk_inputs: tuple[Meta, ...], cutting: Cutting, links: Links, world: World, *, amp: bool
    ) -> None:
        self.model, self._cutting, self._links, self._world, self._amp = model, cutting, links, world, amp
        self._workers = cutting.in_process or world.workers
        units, traced = model.units, model.traced(chunk_inputs, amp=amp, device=world.device)
        self.cuts = _given_cuts(cutting, self._workers, len(units)) or choose_cuts(
            len(units),
            self._workers,
            cutting.layout,
            client_layers=cutting.client_layers,
            costs=costs_of(traced) if cutting.costs is None else cutting.costs,
        )
        self.modules = cut_units(units, self.cuts)
        outputs = [traced[end - 1].outputs for end in (*self.cuts, len(units))]
        # The tensors before the first stage, between stages, and after the last.
        self.between = [chunk_inputs, *_with_gradients(outputs, self.modules)]
        self.holdings = holdings_of(self.modules, model.names, self._workers)
        operations = [max(unit.flops, 1) for unit in traced]
        self._operations = [sum(operations[start:end]) for start, end in pairwise((0, *self.cuts, len(units)))]
        check_shared(self.modules, self._workers)
        check_private(self.modules, self.between)
        self.frozen_before = 0  # links to stages up to this one send activations once

    def link_plans(self) -> tuple[LinkPlan, ...]:
        pairs = [(index, index + 1) for index in range(len(self.modules) - 1)]
        gradients = {there: [meta for meta in self.between[there] if meta.has_gradient] for _, there in pairs}
        chunks, workers = self._cutting.chunks, self._workers

        def plan(source: int, target: int, metas: Sequence[Meta], spec: str) -> LinkPlan:
            slots, is_once = [Slot.of(meta) for meta in metas], source < target <= self.frozen_before
            codec = sent_once(spec) if is_once else link_codec(spec)
            return plan_link((source, target), slots, codec, chunks=chunks, workers=workers, world=self._world)

        forward = [plan(here, there, self.between[there], self._links.forward) for here, there in pairs]
        back = [plan(there, here, gradients[there], self._links.backward) for here, there in pairs if gradients[there]]
        return (*forward, *back)

    def float_bytes_per_chunk(self) -> int:
        """Return the bytes per chunk of all activations and gradients that cross the links of the pipeline."""
        crossing = [meta for metas in self.between[1:-1] for meta in metas if meta.dtype.is_floating_point]
        return sum((1 + meta.has_gradient) * meta.bytes for meta in crossing)

    def choose_order(self, own: Iterable[int], *, recompute: bool) -> Order:
        """Return the order with as many chunks in flight as the links need and the memory limit allows. A collective.

        ``own``: the stages of this worker.
        """
        chunks, placement = self._cutting.chunks, [index % self._workers for index in range(len(self.modules))]
        wire_bytes = {(link.source, link.target): link.wire_bytes // chunks for link in self.link_plans()}
        limit = self._cutting.memory_limit
        kept = {} if limit is None else self._kept_bytes(own, recompute=recompute)

        def needed(order: Order) -> int:
            return peak_activation_bytes(make_order(order, placement, chunks), kept)

        def fits(order: Order) -> bool:
            return limit is None or needed(order) <= limit

        links = self._links.shaping
        order = choose_order(self._cutting.order, placement, chunks, links, wire_bytes, self._operations, fits)
        if limit is not None and not fits(order):
            raise OptionError(
                f"a worker keeps {size_text(needed(order))} of chunks in flight, and {{memory_limit}} allows "
                f"{size_text(limit)}. Allow more; cut a batch into more {{chunks}}, which are smaller; take "
                "{schedule} 1f1b, which has fewer in flight; or {recompute}"
            )
        return order

    def _kept_bytes(self, own: Iterable[int], *, recompute: bool) -> Mapping[int, int]:
        """Return the bytes kept per chunk by every stage. A collective."""
        device = self._world.device

        def measure() -> dict[str, int]:
            sizes = {}
            for index in own:
                module, zeros = self.modules[index], [meta.zeros(device) for meta in self.between[0]]
                inputs = [meta.zeros(device, gradient=index > 0) for meta in self.between[index]]
                side_inputs = self.model.side_inputs(module.asks, zeros)
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._amp):
                    sizes[str(index)] = kept_bytes(module, inputs, side_inputs, recompute=recompute)
            return sizes

        # Together: another worker may have failed before this point.
        sizes = self._world.gather(self._world.together(measure))
        return {int(index): size for each in sizes for index, size in each.items()}


def _given_cuts(cutting: Cutting, workers: int, units: int) -> tuple[int, ...] | None:
    """Return the cuts that the user has chosen; raise OptionError unless they fit the layout and the model."""
    cuts, stages = cutting.cuts, stage_count(workers, cutting.layout)
    if cuts is not None and (len(cuts) != stages - 1 or list(cuts) != sorted({*cuts} & {*range(1, units)})):
        raise OptionError(
            f"{{cuts}} are {stages - 1} rising numbers of units from 1 to {units - 1}, for the {stages} stages of "
            f"{workers} workers, {cutting.layout}; got {','.join(map(str, cuts))}"
        )
    return cuts


def _with_gradients(outputs: Sequence[Sequence[Meta]], modules: Sequence[nn.Module]) -> list[tuple[Meta, ...]]:
    """Return the outputs of stages; those with no trained stage up to there are marked as without gradients."""
    found, trained = [], False
    for metas, module in zip(outputs, modules, strict=True):
        trained = trained or any(each.requires_grad for each in module.parameters())
        found.append(tuple(replace(meta, trained=trained) for meta in metas))
    return found
