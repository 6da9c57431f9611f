"""Resolution of settings: from the user's options and a task's defaults, or from those that a run was saved with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from thinpipe.codecs.recipes import DEFAULT_RECIPE, directions
from thinpipe.comm.membership import is_served, member
from thinpipe.links.registry import link_codec
from thinpipe.options import OptionError, as_typed, options_of, read
from thinpipe.train.checkpoints.folder import (
    candidates,
    check_exported,
    check_save_folder,
    checkpoints,
    is_complete,
    newest_manifest,
)
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.running import Capture, RunOptions, check_devices
from thinpipe.train.settings import Settings, Trained
from thinpipe.train.tasks.task import TaskDefaults
from thinpipe.train.tasks.tasks import task as find_task

LORA_LR = 2e-4  # of adapters, which begin at zero: ten times full fine-tuning's, as LoRA's authors and users have it


def resolve_run(given: Mapping[str, Any], *, here: bool = True) -> tuple[Settings, RunOptions]:
    """Return the settings of a run and the options of its execution; raise OptionError for conflicts.

    ``given`` are options by their names as on the command line; None, or missing, if they were not given. With
    ``here=False`` the run may be for another machine, whose GPUs are not checked.
    """
    if given.get("task") is None and (given.get("model") is not None or given.get("config") is not None):
        given = {**given, "task": "lm"}  # the task that needs only a model
    settings, running = _resolve_run(_given_settings(given), read(RunOptions, given) | _capture(given))
    if here:
        check_devices(settings.devices)
    if is_served() and running.save is not None:
        running = replace(running, save_local=True)  # checkpoints are the client's alone
    running.check_with(settings)
    return settings, running


def resolve_evaluation(run: Path | None, given: Mapping[str, Any], adapter: SavedAdapter | None = None) -> Settings:
    """Return the settings of an evaluation: those of a run, overridden by the given ones, or new ones."""
    chosen = {name: value for name, value in _given_settings(given).items() if value is not None}
    me = member()
    if me is not None:
        chosen["workers"] = me.size
    if adapter is not None:
        _check_alone(run, chosen)
        check_exported(str(adapter.folder), "adapter")
        chosen = adapter.completed(chosen)
    trained_with = None
    if run is not None:
        check_saved("{run}", run)
        saved = newest_manifest(run)[1].settings
        trained_with = saved.compress_forward
        chosen = _kept(saved, chosen) | chosen
    elif chosen.get("model") is not None:
        check_exported(chosen["model"])
        chosen.setdefault("task", "lm")
    settings = _resolve_new(chosen)
    spec = settings.compress_forward
    if settings.parallel == "pipeline" and link_codec(spec).needs_basis and spec != trained_with:
        raise OptionError(
            f"{spec} learns while a model is trained through it, and this one was not: give {{compress}} a codec "
            "that learns nothing, as in 4bit or gauss:3"
        )
    check_devices(settings.devices)
    return settings


def resolve(given: Mapping[str, Any], defaults: TaskDefaults, *, device: str) -> Settings:
    """Return settings from the user's options (as in Settings, and ``compress`` for both directions) and defaults."""
    chosen = {name: value for name, value in given.items() if value is not None}
    parallel = chosen.get("parallel", "pipeline")
    client_server = parallel == "pipeline" and chosen.get("layout", "client-server") == "client-server"
    idle = [name for name in ("layout", "client_layers", "cuts", "schedule", "recompute") if chosen.get(name)]
    if parallel != "pipeline" and idle:
        marked = ", ".join(f"{{{name}}}" for name in idle)
        raise OptionError(f"{marked} shape a pipeline; leave them out with {{parallel}} {parallel}")
    if not client_server and "client_layers" in chosen:
        raise OptionError("{client_layers} is for {parallel} pipeline with {layout} client-server; leave it out")
    if "client_layers" in chosen and "cuts" in chosen:
        raise OptionError("{cuts} name all stages: leave out {client_layers}")
    if "compress" in chosen and {"compress_forward", "compress_backward"} & chosen.keys():
        raise OptionError("{compress} sets both directions: give it, or {compress_forward} and {compress_backward}")
    forward, backward = directions(DEFAULT_RECIPE if parallel == "pipeline" else "none")
    found: dict[str, Any] = {name: declared.default_value for name, declared in options_of(Settings).items()}
    found |= {each.name: getattr(defaults, each.name) for each in fields(TaskDefaults)}
    if "lora" in chosen and chosen.get("optimizer", found["optimizer"]) == "adamw":
        found["lr"] = LORA_LR
    found |= {"workers": 1 if parallel == "none" else 2, "device": device}
    found |= {"compress_forward": forward, "compress_backward": backward}
    if not client_server or "cuts" in chosen:
        found["client_layers"] = None
    if parallel != "pipeline":
        found["chunks"] = 1
    settings = Settings(**found | _with_codecs(chosen, parallel))
    if "momentum" in chosen and settings.optimizer != "sgd":
        raise OptionError(
            f"{{momentum}} is SGD's, and {{optimizer}} {settings.optimizer} has none: leave it out, or give "
            "{optimizer} sgd"
        )
    return settings


def resolve_for_resume(given: Mapping[str, Any], saved: Settings) -> Settings:
    """Return the saved settings with the movable ones replaced; raise OptionError if the user changes another."""
    chosen = _with_codecs({name: value for name, value in given.items() if value is not None}, saved.parallel)
    shapes = () if saved.parallel == "pipeline" else ("layout", "client_layers")  # only of a pipeline
    moved = {name: value for name, value in chosen.items() if _movable(name) and name not in shapes}
    differing = [
        f"  {{{name}}}: {as_typed(getattr(saved, name))} when it was saved, {as_typed(value)} now"
        for name, value in chosen.items()
        if name not in moved and not _is_same(name, value, getattr(saved, name))
    ]
    if differing:
        raise OptionError(
            "a run goes on with the options it was saved with, these differ:\n"
            + "\n".join(differing)
            + "\nLeave them out: {resume} knows them. Or start a new run without it."
        )
    layout = moved.get("layout", saved.layout)
    if layout != "client-server" and "client_layers" in moved:
        raise OptionError("{client_layers} is for {layout} client-server; leave it out")
    if layout != saved.layout:
        moved.setdefault("client_layers", None)  # default for the new layout: cut so that the work is balanced
    if moved.keys() & {"workers", "layout", "client_layers"}:
        moved.setdefault("cuts", None)
    return replace(saved, **moved)


def fixed_differences(saved: Settings, here: Settings) -> list[str]:
    """Return the names of settings that differ and must not."""
    return [name for name in options_of(Settings) if not _movable(name) and getattr(saved, name) != getattr(here, name)]


def check_saved(what: str, run: Path) -> None:
    """Raise OptionError unless ``run`` is a folder of checkpoints, or a checkpoint."""
    if not is_complete(run) and not checkpoints(run):
        raise OptionError(f"{what} is a folder that a run was saved in, or one checkpoint of it; {run} has none")


def _given_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    return read(Settings, given) | {"compress": given.get("compress")}


def _resolve_run(given: dict[str, Any], run: dict[str, Any]) -> tuple[Settings, RunOptions]:
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
        return _resolve_new(given), RunOptions(**{"save": resume, "resume": resume, **run})
    _, manifest = newest_manifest(resume)
    settings = resolve_for_resume(given, manifest.settings)
    folder = resume.parent if candidates(resume) == [resume] else resume
    check_save_folder(save or folder, resume)
    saved_options = {"save": folder, "resume": resume} | asdict(manifest.options)
    return settings, RunOptions(**(saved_options | run))


def _resolve_new(given: Mapping[str, Any]) -> Settings:
    """Return the settings of a new run on this machine's devices."""
    chosen = find_task(given.get("task") or "digits")
    defaults = (chosen.model_defaults if given.get("model") else None) or chosen.defaults
    return resolve(given, defaults, device="cuda" if torch.cuda.is_available() else "cpu")


def _capture(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``capture`` field of ``RunOptions``, if captures are configured."""
    chosen = read(Capture, given)
    if chosen and "path" not in chosen:
        name = options_of(Capture)[next(iter(chosen))].name
        raise OptionError(f"{{{name}}} is an option of a capture: name its file with {{capture}}")
    return {"capture": Capture(**chosen)} if chosen else {}


def _kept(saved: Settings, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that its evaluation keeps: of model and data all, of others the marked ones."""
    same = chosen.get("parallel", saved.parallel) == saved.parallel
    marks = ("always", "same parallel") if same else ("always",)
    names = [name for name, declared in options_of(Settings).items() if declared.kept in marks]
    kept = {name: getattr(saved, name) for name in (*options_of(Trained), *names)}
    if chosen.get("compress") is not None or saved.parallel == "data":
        kept.pop("compress_forward", None)
    return kept


def _check_alone(run: Path | None, chosen: Mapping[str, Any]) -> None:
    """Raise OptionError for options that conflict with {adapter}: other weights, or none."""
    if run is not None:
        raise OptionError("{run} and {adapter} both bring weights: give one of them")
    if "config" in chosen:
        raise OptionError("{adapter} belongs to the weights of a model: leave out {config}")
    if not chosen.get("pretrained", True):
        raise OptionError("{adapter} belongs to the weights of a model: leave out {no_pretrained}")


def _is_same(name: str, given: Any, saved: Any) -> bool:
    """Return True if an option has the saved value; 1f1b matches 1f1b:N, saved with its number of chunks in flight."""
    return bool(given == saved or (name == "schedule" and given == "1f1b" and saved.startswith("1f1b:")))


def _movable(name: str) -> bool:
    return options_of(Settings)[name].movable


def _with_codecs(given: Mapping[str, Any], parallel: str) -> dict[str, Any]:
    """Return options in which each direction has its own codec, and no preset. Replicas send gradients only."""
    resolved = dict(given)
    if "compress" in resolved:
        both = resolved.pop("compress")
        resolved |= {"compress_forward": both, "compress_backward": both}
    if "compress_forward" in resolved:
        resolved["compress_forward"] = directions(resolved["compress_forward"])[parallel == "data"]
    if "compress_backward" in resolved:
        resolved["compress_backward"] = directions(resolved["compress_backward"])[1]
    return resolved
