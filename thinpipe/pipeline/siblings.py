"""The stages that this worker runs together, found without asking the user for them.

A worker may have several stages of one pipeline (client and servers, torch's looped and V schedules). Some things are
done once for all of them: the first action of a step posts the receives of all, the last stage to end waits for what
all have sent, and one of them compares notes with the other workers. torch tells a stage nothing about the others, so
every stage of the process is noted here, weakly: one that nobody else holds is gone. A process may have several
pipelines, one to train and one to evaluate. A schedule gives all its stages one and the same placement, the very
object, and by that stages of one pipeline know each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from thinpipe.comm import exchange

if TYPE_CHECKING:
    from thinpipe.pipeline.linked_stage import LinkedStage
    from thinpipe.pipeline.shaped_stage import ShapedStage

_STAGES: WeakSet[LinkedStage] = WeakSet()  # all of this process


def register(stage: LinkedStage) -> None:
    _STAGES.add(stage)


def siblings_of(stage: LinkedStage) -> list[LinkedStage]:
    """The stages this worker runs together with this one, and itself, in their order."""
    placement = stage.stage_index_to_group_rank
    together = [each for each in _STAGES if each.stage_index_to_group_rank is placement]
    return sorted(together, key=lambda each: each.stage_index)


def indices_here(stage: ShapedStage) -> list[int]:
    """The stages that the schedule gives to this worker, whether they are made or not."""
    placement = stage.stage_index_to_group_rank
    return [index for index, worker in placement.items() if worker == stage.group_rank]


def check_place(stage: LinkedStage) -> None:
    """ValueError if the schedule gives this stage to another worker."""
    placement, index = stage.stage_index_to_group_rank, stage.stage_index
    if placement[index] != stage.group_rank:
        raise ValueError(
            f"stage {index} of {stage.num_stages} belongs to worker {placement[index]} of {stage.group_size} under "
            f"this schedule, but worker {stage.group_rank} made it; "
            f"make {' and '.join(f'stage {each}' for each in indices_here(stage))} here"
        )


def agree(stage: ShapedStage, facts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Compare what the stages of this worker know with the other workers; an error on all where it differs.

    Returns what all of them know.
    """
    known = dict(itertools.chain.from_iterable(each.items() for each in facts))
    return exchange.agree(known, stage.group, stage.device)
