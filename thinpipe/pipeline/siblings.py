"""A registry of the stages that this worker runs together, so that users need not pass them.

A worker may have several stages of one pipeline (client and servers, torch's looped and V schedules). Some operations
run once for all of them: the first action of a step posts the receives of all, the last stage to end waits for the
sends of all, and one of them compares settings with the other workers. A stage of torch has no reference to the
others, so every stage of the process is registered here, by a weak reference. A process may have several pipelines, one
to train and one to evaluate. A schedule gives all its stages the same placement object, whose identity marks the stages
of one pipeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from thinpipe.comm.group import Group

if TYPE_CHECKING:
    from thinpipe.pipeline.linked_stage import LinkedStage
    from thinpipe.pipeline.shaped_stage import ShapedStage

_STAGES: WeakSet[LinkedStage] = WeakSet()  # all of this process


def register(stage: LinkedStage) -> None:
    _STAGES.add(stage)


def siblings_of(stage: LinkedStage) -> list[LinkedStage]:
    """Return this stage and the stages that this worker runs together with it, in their order."""
    placement = stage.stage_index_to_group_rank
    together = [each for each in _STAGES if each.stage_index_to_group_rank is placement]
    return sorted(together, key=lambda each: each.stage_index)


def indices_here(stage: ShapedStage) -> list[int]:
    """Return the indices of the stages that the schedule assigns to this worker, created or not."""
    placement = stage.stage_index_to_group_rank
    return [index for index, worker in placement.items() if worker == stage.group_rank]


def check_place(stage: LinkedStage) -> None:
    """Raise ValueError if the schedule assigns this stage to another worker."""
    placement, index = stage.stage_index_to_group_rank, stage.stage_index
    if placement[index] != stage.group_rank:
        raise ValueError(
            f"stage {index} of {stage.num_stages} belongs to worker {placement[index]} of {stage.group_size} under "
            f"this schedule, but worker {stage.group_rank} made it; "
            f"make {' and '.join(f'stage {each}' for each in indices_here(stage))} here"
        )


def agree(stage: ShapedStage, facts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Compare the facts of this worker's stages with the other workers; return those of all.

    Raises an error on all workers if they differ.
    """
    known = dict(itertools.chain.from_iterable(each.items() for each in facts))
    return Group.of(stage.group, stage.device).agree(known)
