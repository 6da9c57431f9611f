"""What workers will import: guessed from a verb's arguments, so that it begins while the verb itself is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

from thinpipe.workers.forking import import_ahead

_WORKERS = {
    "train": "thinpipe.training.worker",
    "evaluate": "thinpipe.training.worker",
    "generate": "thinpipe.generation.worker",
}


def begin(verb: str, arguments: Sequence[str]) -> None:
    """Start the server that forks workers, if the verb will ask for some; a wrong guess costs only time."""
    given = dict(pairwise([*arguments, ""]))
    given |= {name: value for name, equals, value in (each.partition("=") for each in arguments) if equals}

    def has(*names: str) -> bool:
        return not given.keys().isdisjoint(names)

    if verb not in _WORKERS or has("--help", "--rank") or "RANK" in os.environ:
        return
    modules = [_WORKERS[verb], "thinpipe.codecs.kernels.cpu"]
    if has("--lora", "--adapter"):
        modules.append("peft")
    if verb != "train" or has("--model", "--config"):
        import_ahead(*modules, "transformers")
    elif has("--resume"):  # whose task its checkpoint knows
        import_ahead(*modules)
    else:
        import_ahead(*modules, "thinpipe.workloads.preload", THINPIPE_TASK=given.get("--task", "digits"))
