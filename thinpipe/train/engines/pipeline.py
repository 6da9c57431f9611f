"""The pipeline engine: this worker's stages, and the two schedules that run them, for training and for evaluation.

Evaluation has separate stages around the same modules. So it starts from the codec state of training without changing
it, its bytes do not count as training's, and alternating between the two needs no new setup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.codecs.rounding import rounding_key
from thinpipe.links.link import Link
from thinpipe.links.registry import link_codec
from thinpipe.links.slot import Handover, Slot
from thinpipe.pipeline.order import Order, in_flight
from thinpipe.pipeline.partition import StageModule, stages_of
from thinpipe.pipeline.report import LinkReport, report, reset_counters
from thinpipe.pipeline.schedule import ClientServerSchedule, LinearSchedule, OrderedSchedule
from thinpipe.train.engines.engine import Engine, NamedModule, to_device
from thinpipe.train.engines.finite import CheckedStage, NonFiniteReport, not_finite, sum_of_squares
from thinpipe.train.engines.frozen_prefix import find_prefix
from thinpipe.train.engines.loss import Loss
from thinpipe.train.engines.partitioned_model import Cutting, Links, PartitionedModel
from thinpipe.train.engines.plan import LinkPlan, check_stage_memory
from thinpipe.train.engines.simulator import Hop
from thinpipe.train.engines.units import Meta, Units, cut_model
from thinpipe.train.engines.world import World
from thinpipe.train.tasks.task import Batch


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
        make_loss: Callable[..., Loss] = Loss,
    ) -> None:
        super().__init__(world)
        self._cutting, self._links, self._amp, self._recompute = cutting, links, amp, recompute
        self._handover: Handover | None = None if cutting.in_process is None else {}
        units = model if isinstance(model, Units) else cut_model(model, chunk_inputs)
        self.partition = cut = PartitionedModel(units, chunk_inputs, cutting, links, world, amp=amp)
        self.cuts, self.holdings, self.stage_count = cut.cuts, cut.holdings, len(cut.modules)
        own = stages_of(world.worker, world.workers, cutting.layout)
        mine = {index: cut.modules[index] for index in (own if cutting.in_process is None else range(self.stage_count))}
        check_stage_memory(mine.values(), world, units.saved_bytes(mine.values()))
        indices = [stages_of(worker, world.workers, cutting.layout) for worker in range(world.workers)]
        units.load_own(mine.values(), world.device, [[cut.modules[index] for index in each] for each in indices])
        self.stages = {index: NamedModule.of(module, units.model) for index, module in mine.items()}
        for module in mine.values():
            world.to_device(module)
        if units.outputs is not None:
            units.buffers_to(world.device)
        self._side_input_names = {name for module in mine.values() for name in module.asks}
        self.reads_inputs = 0 in mine or bool(self._side_input_names)
        self.reads_labels = self.stage_count - 1 in mine
        self.owns_state = True
        self.client_has_outcome = cutting.layout == "client-server" or cutting.in_process is not None
        self.prefix = find_prefix(cut, mine, links, world, amp=amp)
        self.notices = [self.prefix.notice] if self.prefix.notice else []
        cut.frozen_before = self.prefix.before or 0
        self.order = cut.choose_order(mine, recompute=recompute)
        for module in cut.modules:
            module.plan += f", {self.order}"  # workers compare their plans
        self.training_stages = [self._stage(module, index, training=True) for index, module in mine.items()]
        self._evaluation_stages = [self._stage(module, index, training=False) for index, module in mine.items()]
        self.loss = make_loss(units.tail, device=world.device, amp=amp)
        self._trainer = self._schedule(self.training_stages, self.loss)
        self._evaluator = self._schedule(self._evaluation_stages, None)
        self._losses: list[Tensor] = []
        self._predictions = 0  # since the last step of training
        self._sent_before = 0  # bytes, before the counters were last reset

    def _stage(self, module: StageModule, index: int, *, training: bool) -> Any:
        links = self._links
        stage = CheckedStage(
            *self._stage_arguments(module, index, training=training),
            group=self.world.group,
            forward=links.forward,
            backward=links.backward,
            **self._sample_options(training=training),
            # As many chunks as the order has in flight: a worker that could compute does not wait for a link.
            window=in_flight(self.order, self.stage_count, self._cutting.chunks),
            handover=self._handover,
            deferred_batch_norm=training,
            recompute=training and self._recompute,
            seed=links.seed,
            amp=self._amp,
        )
        for link in stage.links.sends:
            link.warns = False  # link plans report it
        return stage

    def _sample_options(self, *, training: bool) -> dict[str, Any]:
        """Return the options of links that keep something of every sample."""
        cache = self._links.cache
        if cache is None or self.prefix.before is None:
            return {}
        return {
            "samples": cache.samples if training else cache.validation_samples,
            "copies_in": cache.directory,
            "frozen_before": self.prefix.before,
            "keeps": self.prefix.keeps,
        }

    def _stage_arguments(self, module: StageModule, index: int, *, training: bool) -> tuple[Any, ...]:
        """Return the arguments of torch's stage class, with example inputs and outputs of one chunk."""
        device = self.world.device
        return (
            module,
            index,
            self.stage_count,
            device,
            tuple(meta.example(device, gradient=training and index > 0) for meta in self.partition.between[index]),
            tuple(meta.example(device, gradient=training) for meta in self.partition.between[index + 1]),
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
        for meta in {meta for cut in cuts for meta in self.partition.between[cut]}:
            for spec in specs:
                link_codec(spec).warm_up(Slot.of(meta), self._cutting.chunks, self.world.device)

    @property
    def links(self) -> list[Link]:
        return [link for stage in self.training_stages for link in stage.links]

    def reserve_cache(self) -> None:
        """Allocate the activation cache; raise ValueError if there is no space."""
        for stage in (*self.training_stages, *self._evaluation_stages):
            for link in stage.links:
                link.codec.reserve()

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
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        if gradients and chunks > 1:
            torch._foreach_div_(gradients, chunks)
        if not labels:
            return 0.0, 0.0
        return float(torch.stack(self._losses).detach().mean()), self.loss.correct()

    def expect_step(self) -> None:
        for link in self.links:
            link.expect_step()

    def cancel_prefetch(self) -> None:
        for link in sorted(self.links, key=lambda link: not link.route.sends):
            link.cancel_prefetch()

    def _begin_batch(self, number: int, batches: int) -> None:
        for stage in self.training_stages:
            stage.begin_batch(number * self._cutting.chunks)
            if self.samples is not None:
                stage.set_samples(self.samples.chunk(batches)[number])

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
            for link in evaluated.links:
                number = self._predictions if link.sent is None else 0  # samples have keys of their own
                link.codec.seed = rounding_key(self._links.seed, number)
            if self.samples is not None:
                evaluated.set_samples(self.samples)
        self._predictions += 1
        first, side_inputs = self._given(to_device(inputs or (), self.world.device))
        with torch.no_grad():
            return self._evaluator.step(*first, **side_inputs)

    def _given(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return what the schedule cuts into chunks: inputs of the first stage, and side inputs of later ones."""
        side_inputs = self.partition.model.side_inputs(self._side_input_names, inputs) if inputs else {}
        return inputs if 0 in self.stages else (), side_inputs

    def non_finite_reports(self) -> list[NonFiniteReport]:
        return [
            NonFiniteReport(
                stage=stage.stage_index,
                worker=self.world.worker,
                outputs=not_finite(stage.output_sums),
                losses=not_finite(dict(enumerate(self._losses))) if stage.is_last else [],
                input_gradients=not_finite(stage.gradient_sums),
                gradients=not math.isfinite(sum_of_squares(stage.submod.parameters())),
            )
            for stage in self.training_stages
        ]

    def sent_bytes(self) -> int:
        return self._sent_before + _sent_bytes(self.training_stages)

    def evaluation_bytes(self) -> int:
        return _sent_bytes(self._evaluation_stages)

    def collect_links(self) -> tuple[list[LinkReport], float]:
        super().collect_links()
        reports = report(self.training_stages)
        counters = [link.counters() for link in self.links]
        self._sent_before = self.sent_bytes()
        reset_counters(self.training_stages)
        return reports, sum(each.encode_ms + each.decode_ms + each.blocked_ms for each in counters)

    def codec_state(self) -> dict[str, Tensor]:
        return {
            f"link/{stage.stage_index}/{direction}/{key}": value
            for stage in self.training_stages
            for direction, state in stage.link_state_dict().items()
            if direction != "received"  # the sender saves it
            for key, value in state.items()
        }

    def load_codec_state(self, saved: dict[str, Tensor]) -> None:
        for stage in self.training_stages:
            state: dict[str, dict[str, Tensor]] = {}
            for name, value in saved.items():
                _, index, direction, key = name.split("/", 3)
                if int(index) == stage.stage_index:
                    state.setdefault(direction, {})[key] = value
                if int(index) == stage.stage_index - 1 and direction == "sent":
                    state.setdefault("received", {})[key] = value
            stage.load_link_state_dict(state)

    @property
    def chunks(self) -> int:
        return self._cutting.chunks

    def computed_ms(self) -> dict[int, tuple[float, float]]:
        """Return the ms that stages here spent in forwards and backwards, codecs included, since ``collect_links``."""
        found = {}
        for stage in self.training_stages:
            ms, codec_ms = stage.compute_ms(), {"forward": 0.0, "backward": 0.0}
            for link in stage.links:
                codec_ms[link.direction] += link.clock.total_ms()
            backward_ms = ms["backward"] + ms["weight"] + codec_ms["backward"]
            found[stage.stage_index] = ms["forward"] + codec_ms["forward"], backward_ms
        return found

    def set_levels(self, levels: Mapping[Hop, tuple[int, int]]) -> None:
        for stage in (*self.training_stages, *self._evaluation_stages):
            for link in stage.links:
                if (link.source, link.target) in levels:
                    link.codec.level, first = levels[link.source, link.target]
                    link.codec.first_level = first if stage in self.training_stages else link.codec.level

    def link_plans(self) -> tuple[LinkPlan, ...]:
        return self.partition.link_plans()


def _sent_bytes(stages: Sequence[CheckedStage]) -> int:
    return sum(link.ledger.counters.wire_bytes for stage in stages for link in stage.links if link.route.sends)
