"""Jobs: the verb of a run with its settings and options, as JSON, rebuilt and checked on a server.

The client sends none of its paths: where an option names a file, the server has a folder of its cache, or nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from thinpipe.comm.group import Group
from thinpipe.options import from_facts, options_of, shared_values
from thinpipe.train.engines.world import World
from thinpipe.train.events import Listener
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.serve.model_files import ClientFiles, PlacedFiles, describe_files, place_running, place_settings
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.sources import is_model_type
from thinpipe.train.tasks.tasks import task as find_task
from thinpipe.train.worker import Main, train_on_worker

AnySettings = Settings | GenerationSettings
_FILES = ("data", "validation", "model", "config", "tokenizer", "chat_template", "weights")  # options of the client
_THERE = Path("client")  # in place of any path of the client
_OWN_MODELS = ("digits",)  # tasks whose models do not need transformers
_VERBS = {"train_on_worker": "train", "evaluate_on_worker": "evaluate", "generate_on_worker": "generate"}


class Job(NamedTuple):
    """A verb as a worker runs it: ``main(world, settings, *arguments)``."""

    main: Main
    settings: AnySettings
    arguments: tuple[Any, ...]

    @property
    def verb(self) -> str:
        return _VERBS[self.main.__name__]

    @property
    def recovers(self) -> bool:
        """True for a training run that continues without a lost server."""
        return self.verb == "train" and self.arguments[0].mirror_every is not None

    @property
    def needs_transformers(self) -> bool:
        return isinstance(self.settings, GenerationSettings) or self.settings.task not in _OWN_MODELS

    @property
    def adapter(self) -> Path | None:
        if isinstance(self.settings, GenerationSettings):
            return None if self.settings.adapter is None else Path(self.settings.adapter)
        saved = self.arguments[1] if self.verb == "evaluate" else None
        return None if saved is None else saved.folder

    def files(self) -> ClientFiles:
        """Return the files of the client that servers need; raise ValueError if one cannot be sent."""
        chosen = find_task(self.settings.task) if isinstance(self.settings, Settings) else None
        return describe_files(self.settings.source, chosen, self.adapter)

    def offered(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return settings and options for the servers, as JSON."""
        settings = self.settings
        shared = settings.to_json() if isinstance(settings, Settings) else shared_values(settings)
        for name in _FILES:
            value = getattr(settings, name, None)
            if value is not None and not (name == "config" and is_model_type(value)):
                shared[name] = str(_THERE)
        shared |= {"threads": settings.threads, "device": settings.device}
        shared["adapter"] = None if self.adapter is None else str(_THERE)
        if self.verb == "train":
            return shared, self.arguments[0].shared()
        if self.verb == "evaluate":
            run, _, part = self.arguments
            return shared, {"run": run is not None, "part": part}
        return shared, {}


def rebuild(
    verb: str, settings: Mapping[str, Any], options: Mapping[str, Any], placed: PlacedFiles, threads: int | None
) -> Job:
    """Return the job of a server; raise ValueError for what is invalid or not a server's.

    ``threads``: at most as many as the owner allows.
    """
    facts = place_settings(settings, placed)
    if threads is not None:
        facts["threads"] = min(threads, facts.get("threads") or threads)
    if verb == "generate":
        from thinpipe.train.generation.printing import generate_on_worker

        return Job(generate_on_worker, from_facts(GenerationSettings, facts, "settings of the client"), (False,))
    adapter = facts.pop("adapter", None)
    found = Settings.from_json(facts)
    find_task(found.task)
    if verb == "train":
        return Job(train_on_worker, found, (_run_options(options), Listener, find_task))
    if verb == "evaluate":
        from thinpipe.train.evaluation import evaluate_on_worker

        run = place_running(RunOptions(save=_THERE)).save if options.get("run") else None
        saved = None if adapter is None else SavedAdapter(Path(adapter))
        return Job(evaluate_on_worker, found, (run, saved, str(options.get("part"))))
    raise ValueError(f"a run is train, evaluate or generate; got {verb[:40]!r}")


def run_with_files(
    world: World,
    settings: AnySettings,
    main: Main,
    exchange: Callable[[Group], AbstractContextManager[Any]],
    *arguments: Any,
) -> Any:
    """Run a verb's main function while the client sends, and servers fetch, model files."""
    with exchange(world.control):
        return main(world, settings, *arguments)


def _run_options(shared: Mapping[str, Any]) -> RunOptions:
    """Return the options of one execution from those that all workers share."""
    facts = dict(shared)
    for name, declared in options_of(RunOptions).items():
        if declared.per_machine == "presence":
            there = _THERE.with_suffix(".json") if name == "trace" else _THERE
            facts[name] = str(there) if facts.get(name) else None
    captured = facts.pop("capture", None)
    running = from_facts(RunOptions, facts, "options of the client")
    if captured is not None:
        names = dict(zip(("steps", "chunks", "limit"), captured, strict=True))
        capture = from_facts(Capture, names | {"path": str(_THERE.with_suffix(".safetensors"))}, "a capture")
        running = RunOptions(**{**vars(running), "capture": capture})
    return place_running(running)
