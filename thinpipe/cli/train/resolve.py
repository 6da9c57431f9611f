"""Resolution of the options of thinpipe train to the settings of a new or a resumed run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from thinpipe.comm.membership import become_member, member
from thinpipe.lab.netem.network import check_launch
from thinpipe.options import OptionError, options_of, read
from thinpipe.train.checkpoints.folder import candidates, check_save_folder, checkpoints, newest_manifest
from thinpipe.train.resolve import resolve, resolve_for_resume
from thinpipe.train.running import Capture, RunOptions, check_devices
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.tasks import task


def resolve_run(given: Mapping[str, Any], *, here: bool = True) -> tuple[Settings, RunOptions]:
    """Return the settings of a run and the options of its execution; raise OptionError for conflicts.

    ``given`` are options by their names as on the command line; None, or missing, if they were not given. With
    ``here=False`` the run may be for another machine, whose GPUs are not checked.
    """
    settings, running = _settle(
        read(Settings, given) | {"compress": given.get("compress")}, read(RunOptions, given) | _capture(given)
    )
    if here:
        check_devices(settings)
    running.check_with(settings)
    check_launch([settings.workers], [running.link])
    return settings, running


def join_machines(rank: int | None, master: str | None, workers: int | None) -> None:
    """Make this process one of the workers on several machines, if the options are given."""
    if rank is None and master is None:
        return
    if rank is None or master is None or workers is None:
        raise OptionError(
            "on several machines every worker is told its number, where worker 0 is, and how many there are: "
            "{rank} N {master} HOST:PORT {workers} N, on each"
        )
    if member() is not None:
        raise OptionError("torchrun has told this worker its number already: leave out {rank} and {master}")
    become_member(rank, workers, master)


def _settle(given: dict[str, Any], run: dict[str, Any]) -> tuple[Settings, RunOptions]:
    me = member()
    resume, save = run.get("resume"), run.get("save")
    if me is not None:
        if given.get("workers") not in (None, me.size):
            raise OptionError(f"torchrun has started {me.size} workers: leave out {{workers}} {given['workers']}")
        given = given | {"workers": me.size}
        if resume is None and save is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            resume = save if checkpoints(save) else None  # restarted by torchrun's --max-restarts
    is_server = me is not None and me.rank > 0
    if resume is None or (is_server and run.get("save_local") and not resume.exists()):
        # With --save-local only the client has the checkpoints; it sends their settings after the rendezvous.
        if save is not None:
            check_save_folder(save, resume)
        chosen = task(given.get("task") or "digits")
        recipe = (chosen.model_recipe if given.get("model") else None) or chosen.recipe
        found = "cuda" if torch.cuda.is_available() else "cpu"
        where: dict[str, Any] = {"save": resume, "resume": resume}
        return resolve(given, recipe, device=found), RunOptions(**(where | run))
    _, manifest = newest_manifest(resume)
    settings = resolve_for_resume(given, manifest.settings)
    folder = resume.parent if candidates(resume) == [resume] else resume
    check_save_folder(save or folder, resume)
    saved = {"save": folder, "resume": resume} | asdict(manifest.options)
    return settings, RunOptions(**(saved | run))


def _capture(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``capture`` field of ``RunOptions``, if captures are configured."""
    asked = read(Capture, given)
    if asked and "path" not in asked:
        name = options_of(Capture)[next(iter(asked))].name
        raise OptionError(f"{{{name}}} says more about a capture: name its file with {{capture}}")
    return {"capture": Capture(**asked)} if asked else {}
