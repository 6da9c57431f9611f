"""What a server does in a run, as JSON: the verb, its settings and options, rebuilt and checked on arrival.

The client sends none of its paths: where an option names a file, the server has a path in its own folder instead.
Objects that a client names, package.module:name, are not imported (``system.imports.forbid_imports``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from thinpipe.options import OptionError, from_facts, options_of
from thinpipe.system.imports import is_object_name
from thinpipe.train.data import several_read
from thinpipe.train.events import Listener
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.serve.desk import Offer, Rejected
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.tasks import task as find_task
from thinpipe.train.worker import Main, train_on_worker

AnySettings = Settings | GenerationSettings
_NAMES = ("model", "config")  # options whose value may be no file: a name of the hub, a model type
_OWN_MODELS = ("digits",)  # tasks
_FOLDER = "folder"  # what a server gets in place of a client's folder


class Job(NamedTuple):
    """A verb as a worker runs it: ``main(world, settings, *arguments)``."""

    verb: str
    settings: AnySettings
    arguments: tuple[Any, ...]

    @property
    def main(self) -> Main:
        # Imported here: each verb brings its own modules, and a run has one of them.
        if self.verb == "train":
            return train_on_worker
        if self.verb == "evaluate":
            from thinpipe.train.evaluation import evaluate_on_worker

            return evaluate_on_worker
        from thinpipe.train.generation.printing import generate_on_worker

        return generate_on_worker

    @property
    def needs_transformers(self) -> bool:
        """True unless the model is one of thinpipe's own."""
        return isinstance(self.settings, GenerationSettings) or self.settings.task not in _OWN_MODELS

    def check(self) -> None:
        """Raise OptionError for a run that servers without data and code of the client cannot take part in."""
        settings = self.settings
        named = {name: getattr(settings, name, None) for name in ("task", "model")}
        for name, value in named.items():
            if isinstance(value, str) and is_object_name(value):
                raise OptionError(
                    f"servers run no code of the client, and {{{name}}} {value} is code: take a task or a model that "
                    "comes with thinpipe or transformers, or start all workers by hand with {rank}"
                )
        if settings.trust_remote_code:
            raise OptionError("servers run no code of a model: leave out {trust_remote_code}, or start with {rank}")
        if isinstance(settings, Settings) and (settings.parallel != "pipeline" or several_read(settings)):
            raise OptionError(
                "servers have layers, never data or labels: that is {parallel} pipeline with {layout} client-server; "
                f"got {settings.parallel}, {settings.layout}"
            )

    def offered(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return settings and options for the servers, as JSON."""
        settings = self.settings
        kind: type = type(settings)
        shared = dict(settings.shared())
        for name, declared in options_of(kind).items():
            if declared.per_machine is True:
                shared[name] = None
        for name in _NAMES:
            value = getattr(settings, name, None)
            if value is not None:
                shared[name] = _FOLDER if Path(value).exists() else value
        shared["threads"] = settings.threads
        shared["device"] = settings.device
        if self.verb == "train":
            return shared, self.arguments[0].shared()
        if self.verb == "evaluate":
            run, adapter, part = self.arguments
            return shared, {"run": run is not None, "adapter": adapter is not None, "part": part}
        return shared, {"adapter": getattr(settings, "adapter", None) is not None}


def rebuild(offer: Offer, *, place: Path, threads: int | None) -> Job:
    """Return the job of a server; raise Rejected, in one line, for what is invalid or not a server's.

    ``place``: the run's own folder here, for paths; ``threads``: at most as many as the owner allows.
    """
    try:
        settings: AnySettings
        facts = dict(offer.settings)
        if threads is not None:
            facts["threads"] = min(threads, facts.get("threads") or threads)
        facts |= {name: str(place / name) for name in _NAMES if facts.get(name) == _FOLDER}
        options = offer.options
        arguments: Sequence[Any]
        if offer.verb == "generate":
            settings = from_facts(GenerationSettings, facts, "settings of the client")
            arguments = (False,)
        else:
            settings = Settings.from_json(facts)
            find_task(settings.task)
            if offer.verb == "train":
                arguments = (_run_options(options, place), Listener, find_task)
            elif offer.verb == "evaluate":
                arguments = (place / "run" if options.get("run") else None, None, str(options["part"]))
            else:
                raise ValueError(f"a run is train, evaluate or generate; got {offer.verb[:40]!r}")
        job = Job(offer.verb, settings, tuple(arguments))
        job.check()
        return job
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Rejected(f"the offer of the client is not a run of this version: {error}") from None


def _run_options(shared: Mapping[str, Any], place: Path) -> RunOptions:
    """Return the options of one execution: where the client has a file, a path in the run's folder here."""
    facts = {name: value for name, value in shared.items() if name != "capture"}
    for name, declared in options_of(RunOptions).items():
        if declared.per_machine == "presence":
            suffix = ".json" if name == "trace" else ""
            facts[name] = str(place / f"{name}{suffix}") if facts.get(name) else None
    capture = None
    if shared.get("capture") is not None:
        captured = dict(zip(("steps", "chunks", "limit"), shared["capture"], strict=True))
        captured["path"] = str(place / "capture.safetensors")
        capture = from_facts(Capture, captured, "options of a capture")
    return replace(from_facts(RunOptions, facts, "options of the client"), capture=capture)


def verb_of(main: Main) -> str:
    return {"train_on_worker": "train", "evaluate_on_worker": "evaluate", "generate_on_worker": "generate"}[
        main.__name__
    ]
