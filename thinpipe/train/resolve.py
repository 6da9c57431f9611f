"""Resolution of a run's settings from the user's options and a recipe's defaults, or from those it was saved with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from thinpipe.codecs.recipes import DEFAULT_RECIPE, directions
from thinpipe.options import OptionError, options_of, words
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import Recipe

LORA_LR = 2e-4  # of adapters, which begin at zero: ten times full fine-tuning's, as LoRA's authors and users have it


def resolve(given: Mapping[str, Any], recipe: Recipe, *, device: str) -> Settings:
    """Return settings from the user's options (as in Settings, and ``compress`` for both directions) and a recipe."""
    chosen = {name: value for name, value in given.items() if value is not None}
    parallel = chosen.get("parallel", "pipeline")
    client_server = parallel == "pipeline" and chosen.get("layout", "client-server") == "client-server"
    idle = [name for name in ("layout", "client_layers", "schedule", "recompute") if chosen.get(name)]
    if parallel != "pipeline" and idle:
        marked = ", ".join(f"{{{name}}}" for name in idle)
        raise OptionError(f"{marked} shape a pipeline; leave them out with {{parallel}} {parallel}")
    if not client_server and "client_layers" in chosen:
        raise OptionError("{client_layers} is for {parallel} pipeline with {layout} client-server; leave it out")
    if "compress" in chosen and {"compress_forward", "compress_backward"} & chosen.keys():
        raise OptionError("{compress} sets both directions: give it, or {compress_forward} and {compress_backward}")
    forward, backward = directions(DEFAULT_RECIPE if parallel == "pipeline" else "none")
    found: dict[str, Any] = {name: told.usual for name, told in options_of(Settings).items()}
    found |= {name: getattr(recipe, name) for name in found if hasattr(recipe, name)}
    if "lora" in chosen and chosen.get("optimizer", found["optimizer"]) == "adamw":
        found["lr"] = LORA_LR
    found |= {"workers": 1 if parallel == "none" else 2, "device": device}
    found |= {"compress_forward": forward, "compress_backward": backward}
    if not client_server:
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
    asked = _with_codecs({name: value for name, value in given.items() if value is not None}, saved.parallel)
    shapes = () if saved.parallel == "pipeline" else ("layout", "client_layers")  # only of a pipeline
    moved = {name: value for name, value in asked.items() if _movable(name) and name not in shapes}
    differing = [
        f"  {{{name}}}: {words(getattr(saved, name))} when it was saved, {words(value)} now"
        for name, value in asked.items()
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
    return replace(saved, **moved)


def fixed_differences(saved: Settings, here: Settings) -> list[str]:
    """Return the names of settings that differ and must not."""
    return [name for name in options_of(Settings) if not _movable(name) and getattr(saved, name) != getattr(here, name)]


def _is_same(name: str, asked: Any, saved: Any) -> bool:
    """Return True if an option has the saved value; 1f1b matches 1f1b:N, saved with its number of chunks in flight."""
    return bool(asked == saved or (name == "schedule" and asked == "1f1b" and saved.startswith("1f1b:")))


def _movable(name: str) -> bool:
    return options_of(Settings)[name].movable


def _with_codecs(given: Mapping[str, Any], parallel: str) -> dict[str, Any]:
    """Return options in which each direction has its own codec, and no recipe. Replicas send gradients only."""
    settled = dict(given)
    if "compress" in settled:
        both = settled.pop("compress")
        settled |= {"compress_forward": both, "compress_backward": both}
    if "compress_forward" in settled:
        settled["compress_forward"] = directions(settled["compress_forward"])[parallel == "data"]
    if "compress_backward" in settled:
        settled["compress_backward"] = directions(settled["compress_backward"])[1]
    return settled
