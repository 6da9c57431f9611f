"""From the options of thinpipe train to the settings of a run: a new one, or one that goes on."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from thinpipe.bench.inputs import check_launch
from thinpipe.measure.sizes import parse_size
from thinpipe.pipeline.links.spec import encoding
from thinpipe.training.checkpoints.folder import candidates, check_unused, checkpoints, newest_manifest
from thinpipe.training.settings import Capture, Device, Running, Settings, settle, settle_again
from thinpipe.workers.membership import become_member, member
from thinpipe.workers.network import parse_link
from thinpipe.workloads.tasks import task


def settle_run(given: dict[str, Any], resume: Path | None, max_restarts: int, **run: Any) -> tuple[Settings, Running]:
    """What the run is and how it is carried out; ValueError if the options do not go together.

    ``given`` are options as they were given, or None; ``run`` are fields of ``Running``.
    """
    given = given | {"client_layers": _two_numbers(given["client_layers"])}
    settings, running = _settle(given, resume, **run)
    _check(settings, running, max_restarts)
    return settings, running


def join_machines(rank: int | None, master: str | None, workers: int | None) -> None:
    """This process becomes one of the workers on several machines, if the options say so."""
    if rank is None and master is None:
        return
    if rank is None or master is None or workers is None:
        raise ValueError(
            "on several machines every worker is told its number, where worker 0 is, and how many there are: "
            "--rank N --master HOST:PORT --workers N, on each"
        )
    if member() is not None:
        raise ValueError("torchrun has told this worker its number already: leave out --rank and --master")
    become_member(rank, workers, master)


def _settle(given: dict[str, Any], resume: Path | None, **run: Any) -> tuple[Settings, Running]:
    me = member()
    if me is not None:
        if given["workers"] not in (None, me.size):
            raise ValueError(f"torchrun has started {me.size} workers: leave out --workers {given['workers']}")
        given = given | {"workers": me.size}
        if resume is None and run["save"] is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            resume = run["save"] if checkpoints(run["save"]) else None  # torchrun's own --max-restarts
    is_server = me is not None and me.rank > 0
    if resume is None or (is_server and run["save_local"] and not resume.exists()):
        # The second: the client alone has the checkpoints, and tells what is in them when all have met.
        if resume is None and run["save"] is not None:
            check_unused(run["save"])
        recipe = task(given["task"] or "digits").recipe
        found: Device = "cuda" if torch.cuda.is_available() else "cpu"
        run = {"save": resume, "resume": resume} | _given(run)
        return settle(given, recipe, workers=None, device=found), Running(**run)
    _, manifest = newest_manifest(resume)
    settings = settle_again(given, manifest.settings)
    folder = resume.parent if candidates(resume) == [resume] else resume
    habits = {"save": folder, "resume": resume} | asdict(manifest.habits)
    return settings, Running(**(habits | _given(run)))


def _given(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if value is not None}


def _check(settings: Settings, running: Running, max_restarts: int) -> None:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch can use, and there is none; take --device cpu")
    if running.trace is not None and settings.parallel != "pipeline":
        raise ValueError(f"--trace shows the stages of a pipeline; leave it out with --parallel {settings.parallel}")
    if running.capture is not None and settings.parallel != "pipeline":
        raise ValueError(
            f"--capture keeps what crosses the links of a pipeline; leave it out with --parallel {settings.parallel}"
        )
    cached = running.delta_cache is not None or running.delta_cache_limit != Running.delta_cache_limit
    if cached and not encoding(settings.compress_forward).needs_samples:
        raise ValueError(
            "--delta-cache and --delta-cache-limit are for delta(...), and activations travel through "
            f"{settings.compress_forward}; leave them out"
        )
    if running.link is not None and settings.parallel == "none":
        raise ValueError("--link joins several workers, and --parallel none is one process; leave one of them out")
    check_launch([settings.workers], [running.link])
    if max_restarts and running.save is None:
        raise ValueError("--max-restarts goes on from checkpoints: name a folder for them with --save")
    if max_restarts and member() is not None:
        raise ValueError("--max-restarts is for workers that are started here; on several machines start all again")


def parse_rate(text: str | None) -> float | None:
    """Mbit/s of the one link that a run has."""
    if text is None:
        return None
    if "," in text:
        raise ValueError(
            f"a run has links of one rate, as in --link 100mbit; got {text}. Give one: `thinpipe bench pipeline` takes "
            "several, or start a run for each"
        )
    return parse_link(text)


def parse_capture(path: Path | None, steps: str | None, chunks: int | None, limit: str | None) -> Capture | None:
    """What is captured, of the options as they were given."""
    details: dict[str, Any] = {
        "steps": None if steps is None else _step_numbers(steps),
        "chunks": chunks,
        "limit": None if limit is None else parse_size(limit),
    }
    given = {name: value for name, value in details.items() if value is not None}
    if path is None and given:
        raise ValueError(f"--capture-{next(iter(given))} says more about a capture: name its file with --capture")
    return None if path is None else Capture(path=path, **given)


def parse_delta_cache(directory: Path | None, limit: str | None) -> dict[str, Any]:
    """The fields of ``Running`` that say where copies of samples are kept, as far as they were given."""
    given = {"delta_cache": directory, "delta_cache_limit": None if limit is None else parse_size(limit)}
    return {name: value for name, value in given.items() if value is not None}


def _step_numbers(text: str) -> tuple[int, ...]:
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--capture-steps are numbers of steps, as in 10,100; got {text}")
    return tuple(sorted({int(number) for number in numbers}))


def _two_numbers(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, comma, last = text.partition(",")
    if not (comma and first.isdecimal() and last.isdecimal()):
        raise ValueError(f"--client-layers is two numbers, as in 1,1; got {text}")
    return int(first), int(last)
