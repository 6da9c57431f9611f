"""torch's own stage in our engine, to hold ours against: the same model, order and step, another way to send."""

from __future__ import annotations

from typing import Any

from torch.distributed import pipelining

from thinpipe.engines.finite import Checked
from thinpipe.engines.pipeline import PipelineEngine
from thinpipe.pipeline.links.counters import DeviceClock
from thinpipe.pipeline.partition import StageModule
from thinpipe.pipeline.report import LinkReport
from thinpipe.workloads.task import Batch


class _Timed(pipelining.PipelineStage):
    """What our stage counts of itself, and no links: torch sends tensors as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clocks = {kind: DeviceClock(self.device) for kind in ("forward", "backward")}
        self.links: list[Any] = []
        self.needs_samples = False

    def compute_ms(self) -> dict[str, float]:
        return {kind: clock.total_ms() for kind, clock in self.clocks.items()}

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clocks["forward"].measure():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.clocks["backward"].measure():
            super().backward_one_chunk(*args, **kwargs)


class _TorchStage(Checked, _Timed):
    """Stops for numbers that are not finite, as ours does."""


class TorchStageEngine(PipelineEngine):
    """Stages of torch, uncompressed. They do not say how long messages took, but their bytes are known beforehand."""

    _steps = 0  # since ``collect_links``

    def _stage(self, module: StageModule, index: int, *, training: bool) -> Any:
        return _TorchStage(*self._stage_arguments(module, index, training=training), group=self.world.group)

    def compute(self, *batches: Batch | None) -> tuple[float, float]:
        self._steps += len(batches)
        return super().compute(*batches)

    def expect_step(self) -> None:
        """torch's stage posts a receive when it waits for it."""

    def call_off(self) -> None:
        """There is nothing to call off."""

    def collect_links(self) -> tuple[list[LinkReport], float]:
        super().collect_links()
        steps, self._steps = self._steps, 0
        unknown = float("nan")
        reports = [
            LinkReport(
                source=plan.source,
                target=plan.target,
                source_worker=plan.source_worker,
                target_worker=plan.target_worker,
                direction=plan.direction,
                messages=steps * self._cutting.chunks * len(plan.shapes),
                tensor_bytes=steps * plan.tensor_bytes,
                wire_bytes=steps * plan.tensor_bytes,
                encode_ms=0.0,
                decode_ms=0.0,
                blocked_ms=unknown,
                wait_ms=unknown,
                transfer_ms=unknown,
                link_mb_per_s=None,
            )
            for plan in self.link_plans()
        ]
        return reports, 0.0
