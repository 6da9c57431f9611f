"""Workers compare what they believe before they exchange tensors, so that a difference is an error, not a hang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from thinpipe.pipeline.exchange import gather


class DisagreementError(ValueError):
    """The workers of one pipeline were started with different settings."""


def agree(facts: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare ``facts`` (JSON) with every worker's: where two know a fact of one name, it must be the same.

    A collective: every worker of the group calls it. Raises on all of them, naming workers and what differs.
    """
    everyone = gather(dict(facts), group, device)
    lines = []
    for name in sorted({name for known in everyone for name in known}):
        holders: dict[str, list[int]] = {}
        for worker, known in enumerate(everyone):
            if name in known:
                holders.setdefault(json.dumps(known[name]), []).append(worker)
        if len(holders) > 1:
            lines.append(f"  {name}: " + "; ".join(f"{value} on {_workers(who)}" for value, who in holders.items()))
    if lines:
        raise DisagreementError(
            "all workers of a pipeline are started with the same settings, these differ:\n"
            + "\n".join(lines)
            + "\nStart every worker with the same code, command line and thinpipe version."
        )


def _workers(who: list[int]) -> str:
    return ("worker " if len(who) == 1 else "workers ") + ", ".join(map(str, who))
