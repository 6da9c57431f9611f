"""The pipeline engine: this worker's stages, and the two schedules that run them, for training and for evaluation.

Evaluation has separate stages around the same modules. So it starts from the codec state of training without changing
it, its bytes do not count as training's, and alternating between the two needs no new setup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.codecs.rounding import rounding_key
from thinpipe.links.send import SendLink, Tap
from thinpipe.links.slot import Handover, Slot
from thinpipe.links.spec import encoding, once
from thinpipe.options import OptionError
from thinpipe.pipeline.order import Order, in_flight, make_order
from thinpipe.pipeline.partition import Layout, StageModule, UnitCost, choose_cuts, cut_units, stages_of
from thinpipe.pipeline.report import LinkReport, machine_id, report, reset_counters
from thinpipe.pipeline.schedule import ClientServerSchedule, LinearSchedule, OrderedSchedule
from thinpipe.system.sizes import size_text
from thinpipe.train.engines.engine import Engine, NamedModule, to_device
from thinpipe.train.engines.finite import CheckedStage, NonFiniteReport, not_finite, sum_of_squares
from thinpipe.train.engines.latency_model import choose_order
from thinpipe.train.engines.loss import Loss
from thinpipe.train.engines.plan import Holding, LinkPlan, holdings_of, kept_bytes, peak_activation_bytes, plan_link
from thinpipe.train.engines.units import Meta, Units, check_private, check_shared, costs_of, cut_model
from thinpipe.train.engines.world import World
from thinpipe.train.shaping import Shaping
from thinpipe.train.tasks.task import Batch


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """Options for cutting model and batch, and the order in which the pieces are computed."""

    layout: Layout
    order: Order
    chunks: int  # of a batch
    client_layers: tuple[int, int] | None = None  # units of the client at both ends; None: chosen by costs
    costs: Sequence[UnitCost] | None = None  # of the units; None: their operations are counted
    memory_limit: int | None = None  # maximum bytes that a worker keeps of chunks in flight
    in_process: int | None = None  # number of workers whose stages all run here; None: only its own


@dataclass(frozen=True, kw_only=True)
class Links:
    """Options of the links: codecs, their state, and the shaping."""

    forward: str
    backward: str
    seed: int = 0  # of codecs that round at random
    samples: int | None = None  # their number, for delta(...), which keeps copies of them
    copies_in: Path | None = None  # folder of the copies; None: in memory
    shaping: Shaping | None = None  # rate, delay and loss, if known


class PipelineEngine(Engine):
    """This worker's stages of a model that is built identically on every worker."""

    order: Order

    def __init__(
        self,
        model: nn.Module | Units,
        chunk_inputs: tuple[Meta, ...],
        cutting: Cutting,
        links: Links,
        world: World,
        *,
        amp: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__(world)
        self._cutting, self._links, self._amp, self._recompute = cutting, links, amp, recompute
        self._workers = workers = cutting.in_process or world.workers
        self._handover: Handover | None = None if cutting.in_process is None else {}
        whole = model if isinstance(model, Units) else cut_model(model, chunk_inputs)
        units, traced = whole.units, whole.traced(chunk_inputs, amp=amp, device=world.device)
        self.cuts = choose_cuts(
            len(units),
            workers,
            cutting.layout,
            client_layers=cutting.client_layers,
            costs=costs_of(traced) if cutting.costs is None else cutting.costs,
        )
        modules = cut_units(units, self.cuts)
        # The tensors before the first stage, between stages, and after the last.
        outputs = [traced[end - 1].outputs for end in (*self.cuts, len(units))]
        self._between = [chunk_inputs, *_with_gradients(outputs, modules)]
        self._holdings = holdings_of(modules, whole.names, workers)
        self.stage_count = len(modules)
        operations = [max(unit.flops, 1) for unit in traced]
        self._operations = [sum(operations[start:end]) for start, end in pairwise((0, *self.cuts, len(units)))]
        own = stages_of(world.worker, world.workers, cutting.layout)
        mine = own if cutting.in_process is None else list(range(len(modules)))
        check_shared(modules, workers)
        check_private(modules, self._between)
        whole.fill_own(modules[index] for index in mine)
        self.stages = {index: NamedModule.of(modules[index], whole.model) for index in mine}
        for index in mine:
            world.to_device(modules[index])
        if whole.outputs is not None:
            whole.bring(world.device)
        self._whole, self._has_first = whole, 0 in mine
        self._asked = {name for index in mine for name in modules[index].asks}
        self.reads_inputs = self._has_first or bool(self._asked)
        self.reads_labels = self.stage_count - 1 in mine
        self.owns_state = True
        self.client_has_outcome = cutting.layout == "client-server" or cutting.in_process is not None
        self.order = self._choose_order({index: modules[index] for index in mine})
        for module in modules:
            module.plan += f", {self.order}"  # workers compare their plans
        self.training_stages = [self._stage(modules[index], index, training=True) for index in mine]
        self._evaluation_stages = [self._stage(modules[index], index, training=False) for index in mine]
        self.loss = Loss(whole.tail, device=world.device, amp=amp)
        self._trainer = self._schedule(self.training_stages, self.loss)
        self._evaluator = self._schedule(self._evaluation_stages, None)
        self._losses: list[Tensor] = []
        self._samples = torch.empty(0, dtype=torch.int64)  # of the next step
        self._predictions = 0  # since the last step of training
        self._sent_before = 0  # bytes, before the counters were last reset

    def _choose_order(self, mine: Mapping[int, StageModule]) -> Order:
        """Return the order with as many chunks in flight as the links need and the memory limit allows."""
        chunks, placement = self._cutting.chunks, [index % self._workers for index in range(self.stage_count)]
        wire_bytes = {(link.source, link.target): link.wire_bytes // chunks for link in self.link_plans()}
        limit, kept = self._cutting.memory_limit, self._kept_bytes(mine)

        def needed(order: Order) -> int:
            return peak_activation_bytes(make_order(order, placement, chunks), kept)

        def fits(order: Order) -> bool:
            return limit is None or needed(order) <= limit

        links = self._links.shaping
        order = choose_order(self._cutting.order, placement, chunks, links, wire_bytes, self._operations, fits)
        if limit is not None and not fits(order):
            raise OptionError(
                f"a worker keeps {size_text(needed(order))} of chunks on their way, and {{memory_limit}} allows "
                f"{size_text(limit)}. Allow more; cut a batch into more {{chunks}}, which are smaller; take "
                "{schedule} 1f1b, which has fewer on their way; or {recompute}"
            )
        return order

    def _kept_bytes(self, mine: Mapping[int, StageModule]) -> dict[int, int]:
        """Return the bytes kept per chunk by every stage; empty without a memory limit. A collective."""
        if self._cutting.memory_limit is None:
            return {}
        device = self.world.device

        def measure() -> dict[str, int]:
            sizes = {}
            for index, module in mine.items():
                side_inputs = self._whole.side_inputs(module.asks, [meta.zeros(device) for meta in self._between[0]])
                inputs = [meta.zeros(device, gradient=index > 0) for meta in self._between[index]]
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._amp):
                    sizes[str(index)] = kept_bytes(module, inputs, side_inputs, recompute=self._recompute)
            return sizes

        # Together: another worker may have failed before this point.
        told = self.world.gather(self.world.together(measure))
        return {int(index): size for each in told for index, size in each.items()}

    def _stage(self, module: StageModule, index: int, *, training: bool) -> Any:
        links = self._links
        stage = CheckedStage(
            *self._stage_arguments(module, index, training=training),
            group=self.world.group,
            forward=links.forward if training else once(links.forward),
            backward=links.backward,
            samples=links.samples,
            copies_in=links.copies_in,
            # As many chunks as the order has in flight: a worker that could compute does not wait for a link.
            window=in_flight(self.order, self.stage_count, self._cutting.chunks),
            handover=self._handover,
            deferred_batch_norm=training,
            recompute=training and self._recompute,
            seed=links.seed,
            amp=self._amp,
        )
        for link in stage.ends.sends:
            link.warns = False  # link plans report it
        return stage

    def _stage_arguments(self, module: StageModule, index: int, *, training: bool) -> tuple[Any, ...]:
        """Return the arguments of torch's stage class, with example inputs and outputs of one chunk."""
        device = self.world.device
        return (
            module,
            index,
            self.stage_count,
            device,
            tuple(meta.example(device, gradient=training and index > 0) for meta in self._between[index]),
            tuple(meta.example(device, gradient=training) for meta in self._between[index + 1]),
        )

    def _schedule(self, stages: list[CheckedStage], loss: Any) -> Any:
        chunks, order = self._cutting.chunks, self.order
        if self._cutting.in_process is not None:
            return OrderedSchedule(list(stages), chunks, loss, order=order, scale_grads=False)
        if self._cutting.layout == "client-server":
            return ClientServerSchedule(list(stages), chunks, loss, order=order, scale_grads=False)
        return LinearSchedule(stages[0], chunks, loss, order=order, scale_grads=False)

    def warm_up(self) -> None:
        specs = {self._links.forward, self._links.backward}
        cuts = {cut for index in self.stages for cut in (index, index + 1) if 0 < cut < self.stage_count}
        for meta in {meta for cut in cuts for meta in self._between[cut]}:
            for spec in specs:
                encoding(spec).warm_up(Slot.of(meta), self._cutting.chunks, self.world.device)

    def tell_samples(self, samples: Tensor) -> None:
        self._samples = samples

    def reserve_copies(self, limit_bytes: int) -> None:
        """Allocate the copies of samples that ``delta(...)`` keeps. A collective.

        Raise OptionError if the copies of this machine's workers exceed the limit.
        """
        mine = sum(stage.copies_bytes() for stage in self.training_stages)
        told = self.world.gather([machine_id() or f"worker {self.world.worker}", mine])
        here = sum(size for where, size in told if where == told[self.world.worker][0])
        if here > limit_bytes:
            raise OptionError(
                f"delta(...) keeps copies of all samples at both ends of every link: {size_text(here)} on this "
                f"machine, and {{delta_cache_limit}} allows {size_text(limit_bytes)}. Allow more, on disk instead of "
                "in memory with {delta_cache} DIR; cut the model where less travels ({client_layers}); or take "
                "another codec"
            )
        for stage in self.training_stages:
            stage.reserve_copies()

    def compute(self, *batches: Batch | None) -> tuple[float, float]:
        chunks = self._cutting.chunks * len(batches)
        labels = [batch.labels for batch in batches if batch and self.reads_labels]
        self._losses = []
        self._predictions = 0
        if labels:
            self.loss.begin(torch.cat(labels), chunks)
        for number, batch in enumerate(batches):
            self._begin_batch(number, len(batches))
            self._compute_batch(batch)
        # Average over chunks here, not in each stage as torch does: two stages may share a parameter.
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(chunks)
        if not labels:
            return 0.0, 0.0
        return float(torch.stack(self._losses).detach().mean()), self.loss.correct()

    def expect_step(self) -> None:
        for stage in self.training_stages:
            stage.ends.expect_step()

    def cancel_prefetch(self) -> None:
        for stage in self.training_stages:
            stage.ends.cancel_prefetch()

    def _begin_batch(self, number: int, batches: int) -> None:
        for stage in self.training_stages:
            stage.begin_batch(number * self._cutting.chunks)
            if stage.needs_samples:
                stage.tell_samples(self._samples.chunk(batches)[number])

    def _compute_batch(self, batch: Batch | None) -> None:
        """Run forward and backward of one batch; add to the gradients and to the losses of chunks."""
        inputs = to_device(batch.inputs, self.world.device) if batch and self.reads_inputs else ()
        labels = batch.labels.to(self.world.device) if batch and self.reads_labels else None
        losses: list[Tensor] = []
        first, side_inputs = self._given(inputs)
        self._trainer.step(*first, target=labels, losses=losses, **side_inputs)
        self._losses += losses

    def predict(self, inputs: tuple[Tensor, ...] | None) -> Tensor | tuple[Tensor, ...] | None:
        for trained, evaluated in zip(self.training_stages, self._evaluation_stages, strict=True):
            evaluated.load_link_state_dict(trained.link_state_dict())
            # Stochastic rounding differs from all training steps and other batches, and repeats if this step is
            # evaluated again.
            evaluated.set_seed(rounding_key(self._links.seed, self._predictions))
        self._predictions += 1
        first, side_inputs = self._given(to_device(inputs or (), self.world.device))
        with torch.no_grad():
            return self._evaluator.step(*first, **side_inputs)

    def _given(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return what the schedule cuts into chunks: inputs of the first stage, and side inputs of later ones."""
        side_inputs = self._whole.side_inputs(self._asked, inputs) if inputs else {}
        return inputs if self._has_first else (), side_inputs

    def takes(self, evaluation_batch: int) -> bool:
        return True

    def non_finite_reports(self) -> list[NonFiniteReport]:
        return [
            NonFiniteReport(
                stage=stage.stage_index,
                worker=self.world.worker,
                outputs=not_finite(stage.output_sums),
                losses=not_finite(dict(enumerate(self._losses))) if stage.is_last else [],
                input_gradients=not_finite(stage.gradient_sums),
                gradients=not torch.tensor(sum_of_squares(stage.submod.parameters())).isfinite().item(),
            )
            for stage in self.training_stages
        ]

    def sent_bytes(self) -> int:
        return self._sent_before + sum(link.ledger.counters.wire_bytes for link in _sends(self.training_stages))

    def evaluation_bytes(self) -> int:
        return sum(link.ledger.counters.wire_bytes for link in _sends(self._evaluation_stages))

    def compute_ms(self) -> dict[int, tuple[float, float]]:
        """Return the ms in forward and in backward of every stage here since ``collect_links``."""
        times = {stage.stage_index: stage.compute_ms() for stage in self.training_stages}
        return {index: (kinds["forward"], kinds["backward"]) for index, kinds in times.items()}

    def collect_links(self) -> tuple[list[LinkReport], float]:
        super().collect_links()
        reports = report(self.training_stages)
        counters = [link.counters() for stage in self.training_stages for link in stage.links]
        self._sent_before = self.sent_bytes()
        reset_counters(self.training_stages)
        return reports, sum(each.encode_ms + each.decode_ms + each.blocked_ms for each in counters)

    def memory(self) -> dict[str, Tensor]:
        return {
            f"link/{stage.stage_index}/{direction}/{key}": value
            for stage in self.training_stages
            for direction, state in stage.link_state_dict().items()
            if direction != "received"  # the sender saves it
            for key, value in state.items()
        }

    def recall(self, memory: dict[str, Tensor]) -> None:
        for stage in self.training_stages:
            state: dict[str, dict[str, Tensor]] = {}
            for name, value in memory.items():
                _, index, direction, key = name.split("/", 3)
                if int(index) == stage.stage_index:
                    state.setdefault(direction, {})[key] = value
                if int(index) == stage.stage_index - 1 and direction == "sent":
                    state.setdefault("received", {})[key] = value
            stage.load_link_state_dict(state)

    def trace(self, on: bool) -> None:
        """Turn tracing on or off, from the next step on."""
        for stage in self.training_stages:
            stage.trace(on)

    def tap(self, tap: Tap | None) -> None:
        """Set a callback that receives every tensor this worker sends in training, from the next step on."""
        for link in _sends(self.training_stages):
            link.tap = tap

    def float_bytes_per_chunk(self) -> int:
        """Return the bytes per chunk of all activations and gradients that cross the links of the pipeline."""
        crossing = [meta for metas in self._between[1:-1] for meta in metas if meta.dtype.is_floating_point]
        return sum((1 + meta.has_gradient) * meta.bytes for meta in crossing)

    def check_replicas(self, step: int) -> None:
        """Do nothing: a pipeline has no replicas to compare."""

    def holdings(self) -> tuple[Holding, ...]:
        return self._holdings

    def link_plans(self) -> tuple[LinkPlan, ...]:
        pairs = [(index, index + 1) for index in range(self.stage_count - 1)]
        gradients = {there: [meta for meta in self._between[there] if meta.has_gradient] for _, there in pairs}
        chunks, workers = self._cutting.chunks, self._workers

        def plan(source: int, target: int, metas: Sequence[Meta], spec: str) -> LinkPlan:
            slots = [Slot.of(meta) for meta in metas]
            return plan_link((source, target), slots, spec, chunks=chunks, workers=workers, world=self.world)

        forward = [plan(here, there, self._between[there], self._links.forward) for here, there in pairs]
        back = [plan(there, here, gradients[there], self._links.backward) for here, there in pairs if gradients[there]]
        return (*forward, *back)


def _sends(stages: Sequence[CheckedStage]) -> list[SendLink]:
    return [link for stage in stages for link in stage.links if isinstance(link, SendLink)]


def _with_gradients(outputs: Sequence[Sequence[Meta]], modules: Sequence[nn.Module]) -> list[tuple[Meta, ...]]:
    """Return the outputs of stages; those with no trained stage up to there are marked as without gradients."""
    found, trained = [], False
    for metas, module in zip(outputs, modules, strict=True):
        trained = trained or any(each.requires_grad for each in module.parameters())
        found.append(tuple(replace(meta, trained=trained) for meta in metas))
    return found
