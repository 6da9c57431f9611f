"""A pipeline stage with link ends: the start and the end of a step, (1), (3) and (8) of ``stage``.

Private names of torch used here and in ``siblings``, seen on 2.11 and 2.13. Overridden: ``clear_runtime_states``,
which opens a step. Read: ``stage_index_to_group_rank``, where the schedule puts stages; ``group_rank``, ``group_size``
and ``has_backward``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from thinpipe.links.activation_cache import check_samples
from thinpipe.pipeline.delay import delay_ms
from thinpipe.pipeline.shaped_stage import ShapedStage
from thinpipe.pipeline.siblings import agree, check_place, indices_here, register, siblings_of
from thinpipe.version import __version__


class LinkedStage(ShapedStage):
    """A stage that opens and ends steps with the other stages of its worker, and compares settings with all workers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps = 0
        self._placement: dict[int, int] = {}  # the worker of each stage, as the links were set up for it
        self._actions_left = 0  # of the current step
        self._open = self._posted = False
        self.delay_ms = 0.0  # of the slowest link to this worker, measured before the first step
        register(self)

    def set_samples(self, samples: Sequence[int] | Tensor) -> None:
        """Set the samples of the next step, in the order of its batch, so that known activations are not sent again.

        Call it with the same samples for all stages of all workers before ``schedule.step``. A step without samples
        sends all activations. Stages after ``frozen_before`` do not need samples.
        """
        if self.links.sent is not None:
            self.links.samples = check_samples(samples, self.links.sent.samples)

    def link_state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of this stage's links; save it alongside the module's state.

        ``forward`` and ``backward``: codec state, and the steps so far. ``sent`` and ``received``: a learned basis,
        equal at both ends of a link.
        """
        state = {end.direction: end.codec.state_dict() for end in self.links.sends}
        shared = {name: end.codec.shared_state_dict() for name, end in self.links.forward.items()}
        return state | {name: each for name, each in shared.items() if each}

    def load_link_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        for end in self.links.sends:
            end.codec.load_state_dict(state.get(end.direction, {}))
        for name, forward in self.links.forward.items():
            forward.codec.load_shared_state_dict(state.get(name, {}))

    def trace(self, on: bool = True) -> None:
        """Record the arrival time of each message from the next step on (``report``, ``draw``)."""
        for link in self.links:
            link.trace = on

    # (1) A step opens

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        if self.steps == 0:
            check_place(self)
            self._placement = dict(self.stage_index_to_group_rank)
            self.links.place(self._placement, self.group_rank)
            if self.stage_index == max(indices_here(self)):
                known = agree(self, (stage._settings() for stage in siblings_of(self)))
                for stage in siblings_of(self):
                    stage._trains = [known[_trains(index)] for index in range(self.num_stages)]
        elif self._placement != self.stage_index_to_group_rank:
            raise ValueError(
                f"a stage keeps its links and its neighbours: stage {self.stage_index} ran with its stages on workers "
                f"{_workers(self._placement)} and now has a schedule that places them on "
                f"{_workers(self.stage_index_to_group_rank)}. Make new stages for another placement"
            )
        elif self.is_trained and not self._trains[self.stage_index]:
            raise ValueError(
                f"links are set up for the stages that were trained in the first step: stage {self.stage_index} was "
                "frozen then, and some of its parameters require gradients now. Make new stages to train it"
            )
        self.steps += 1
        self._drop_local_buffers()  # an evaluation keeps the tensors handed over
        self._open, self._posted = True, False
        self.links.begin_step(self.steps)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must be equal on all workers before shapes are known."""
        plan = getattr(self.submod, "plan", None)
        return {
            "thinpipe version": __version__,
            "number of stages": self.num_stages,
            "worker of each stage": [self.stage_index_to_group_rank[stage] for stage in range(self.num_stages)],
            "forward codec": self.links.forward_spec,
            "backward codec": self.links.backward_spec,
            "stage that keeps activations, samples": self.links.kept,
            _trains(self.stage_index): self.is_trained,
        } | ({"model and cuts": plan} if plan else {})

    # (3) The first action

    def begin(self) -> None:
        """Post the receives of all stages of this worker at the first action of a step; every action calls this."""
        if self._posted:
            return
        stages = [stage for stage in siblings_of(self) if stage._open and not stage._posted]
        if any(stage._unchecked for stage in stages):
            agree(self, (stage.links.traffic(stage.has_backward) for stage in stages))
            self.delay_ms = delay_ms(self) if self.has_backward else 0.0
        for stage in stages:
            stage.delay_ms = max(stage.delay_ms, self.delay_ms)
            stage._posted, stage._unchecked = True, False
            stage._actions_left = stage._chunks * stage._actions_per_chunk()
            stage.links.begin_messages(stage.has_backward, stage._chunks)
            for link in stage.links.receives:
                if stage.has_backward or link.direction == "forward":
                    link.post()

    # (8) Its end

    def _actions_per_chunk(self) -> int:
        """Return the number of forwards, backwards and sends of a chunk; each calls ``count_action``."""
        forward = 1 + bool(self.links.forward_send)
        return forward + (1 + bool(self.links.backward_send) if self.has_backward else 0)

    def count_action(self) -> None:
        """End the step after its last action: torch's schedules notify a stage of the end of training steps only."""
        self._actions_left -= 1
        if self._actions_left == 0:
            self.end()

    def end(self) -> None:
        """End the step; the last stage of this worker waits until all sends have completed."""
        self._open = False
        stages = siblings_of(self)
        if not any(stage._open for stage in stages):
            for stage in stages:
                for link in stage.links.sends:
                    link.finish()


def _workers(placement: Mapping[int, int]) -> str:
    return ", ".join(str(placement[stage]) for stage in sorted(placement))


def _trains(stage: int) -> str:
    """Return the key of a setting that workers exchange."""
    return f"whether stage {stage} is trained"
