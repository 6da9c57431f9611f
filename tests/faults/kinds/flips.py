"""Bits flipped in flight: a library in every worker changes what it receives over TCP."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

from tests.faults.expected import Expected
from tests.faults.fault import Fault, Impossible
from tests.faults.moments import AT_ONCE
from tests.faults.runs import Run, Setting

_SOURCE = Path(__file__).parents[1] / "flip.c"
_EVERY = (100_000, 500_000, 2_000_000)  # bytes; a worker receives some megabytes in all


def draw_flip(random: random.Random, setting: Setting) -> Fault:
    compiler = shutil.which("cc")
    if compiler is None:
        raise Impossible("flipped bits need a C compiler, cc")
    every, seed = random.choice(_EVERY), random.randrange(1 << 30)

    def start(run: Run) -> None:
        library = run.folder / "flip.so"
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl", "-lpthread"], check=True
        )
        env = {"LD_PRELOAD": str(library), "FLIP_EVERY": str(every), "FLIP_SEED": str(seed)}
        run.start("--save", str(run.saved), "--save-every", "1", env=env)

    return Fault(
        words=f"one bit of about {every // 1000} kB received is flipped, in every worker",
        strike=lambda run: None,
        moment=AT_ONCE,
        # What a flip hits is its own affair; whatever does not end as undisturbed must say so in one line.
        expected=Expected("may", frozenset({1, 2})),
        start=start,
    )
