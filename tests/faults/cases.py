"""Cases: a seed says which fault strikes which run, and when."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Literal

from tests.faults.expected import Result
from tests.faults.fault import Fault, Impossible, carry_out, discard, draw_setting
from tests.faults.kinds import networks, servers
from tests.faults.kinds.caches import draw_cache
from tests.faults.kinds.cuts import draw_cut
from tests.faults.kinds.disks import draw_disk
from tests.faults.kinds.flaps import Lengths, draw_flap, draw_soak
from tests.faults.kinds.flips import draw_flip
from tests.faults.kinds.machines import draw_absent, draw_machine, draw_options, draw_torchrun
from tests.faults.kinds.memory import draw_memory
from tests.faults.kinds.pairs import draw_pair
from tests.faults.kinds.rest import draw_rest
from tests.faults.kinds.signals import draw_signal, draw_stop
from tests.faults.kinds.strangers import draw_stranger
from tests.faults.runs import Setting
from tests.faults.served import new_run
from tests.faults.undisturbed import Undisturbed

# Kind -> how often it is drawn, in relation to the others.
KINDS = {
    "signal": 28,
    "stop": 10,
    "cut": 8,
    "flip": 12,
    "rest": 14,
    "disk": 8,
    "memory": 4,
    "machine": 8,
    "absent": 3,
    "options": 3,
    "torchrun": 2,
    "stranger": 4,
    "two-faults": 6,
    "flap": 4,
    "soak": 1,
}
# The same of runs with servers.
SERVED_KINDS = {
    "reset": 12,
    "outage": 14,
    "address": 12,
    "slow": 6,
    "corrupt": 16,
    "breaks": 8,
    "cache": 10,
    "signal": 20,
    "stop": 12,
    "absent": 5,
    "stranger": 8,
    "two-faults": 8,
    "disk": 5,
    "memory": 4,
}
Transport = Literal["gloo", "serve"]
_WEIGHTS: dict[Transport, dict[str, int]] = {"gloo": KINDS, "serve": SERVED_KINDS}
_DRAW: dict[str, Callable[[random.Random, Setting], Fault]] = {
    "signal": draw_signal,
    "stop": draw_stop,
    "cut": draw_cut,
    "flip": draw_flip,
    "disk": draw_disk,
    "memory": draw_memory,
    "machine": draw_machine,
    "absent": draw_absent,
    "options": draw_options,
    "torchrun": draw_torchrun,
    "stranger": draw_stranger,
    "two-faults": draw_pair,
}
_DRAW_SERVED: dict[str, Callable[[random.Random, Setting], Fault]] = {
    "reset": networks.draw_reset,
    "outage": networks.draw_outage,
    "address": networks.draw_address,
    "slow": networks.draw_slow,
    "corrupt": networks.draw_corrupt,
    "signal": servers.draw_signal,
    "stop": servers.draw_stop,
    "absent": servers.draw_absent,
    "stranger": servers.draw_stranger,
    "two-faults": servers.draw_pair,
    "disk": servers.served(draw_disk),
    "memory": servers.served(draw_memory),
}


def kind_of(seed: int, transport: Transport = "gloo") -> str:
    weights = _WEIGHTS[transport]
    return random.Random(seed).choices(list(weights), list(weights.values()))[0]


def seeds(first: int, cases: int, only: str | None, transport: Transport = "gloo") -> list[int]:
    """Return seeds from a first one on: all, or those of one kind."""
    return list(islice((seed for seed in count(first) if only in (None, kind_of(seed, transport))), cases))


def run_case(
    seed: int,
    undisturbed: Undisturbed,
    *,
    transport: Transport = "gloo",
    lengths: Lengths = Lengths(),  # noqa: B008
    setting: Setting | None = None,
    keep: bool = False,
    forked: bool = False,
) -> tuple[Result, Path]:
    """Carry out the case of a seed, in its setting or another one; its folder stays if asked for, or if it failed.

    ``forked``: fork its commands from a process that has imported everything, which is quicker; always with servers.
    """
    drawn, kind, began = random.Random(f"{seed}"), kind_of(seed, transport), time.monotonic()
    own = draw_setting(drawn)
    setting = setting or own
    result = Result(seed, kind, "")
    folder = Path(tempfile.mkdtemp(prefix=f"fault-{seed}-"))
    try:
        draws = {
            "gloo": _DRAW
            | {
                "rest": partial(draw_rest, undisturbed=undisturbed),
                "flap": partial(draw_flap, lengths=lengths),
                "soak": partial(draw_soak, lengths=lengths),
            },
            "serve": _DRAW_SERVED
            | {
                "breaks": partial(networks.draw_breaks, lengths=lengths),
                "cache": partial(draw_cache, undisturbed=undisturbed),
            },
        }
        fault = draws[transport][kind](drawn, setting)
        setting = fault.setting or setting
        result.words = f"{setting}: {fault.words}"
        is_forked = forked or transport == "serve"
        carry_out(fault, new_run(folder, setting, fault.how, forked=is_forked), undisturbed, result)
    except Impossible as error:
        result.skipped = str(error)
    result.seconds = time.monotonic() - began
    if not keep and not result.problems:
        discard(folder)
    return result, folder
