"""Runs of a client that has files and servers that have none, in the tests' pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.train.toy import Recorder, world_in
from thinpipe.system.tensors import spec_bytes
from thinpipe.train.engines.world import World
from thinpipe.train.evaluation import EvaluationResult, evaluate_on_worker
from thinpipe.train.generation.prompts import Prompt
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.generation.worker import GenerationRun, generate
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.resolve import resolve, resolve_evaluation
from thinpipe.train.running import RunOptions
from thinpipe.train.serve.model_cache import ModelCache
from thinpipe.train.serve.model_files import (
    describe_files,
    fetch_files,
    place_files,
    place_running,
    place_settings,
    serve_files,
)
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.options import Source
from thinpipe.train.tasks.tasks import task
from thinpipe.train.worker import train

SMALL: dict[str, Any] = {"tokens": 16, "samples": 32, "batch_size": 8, "chunks": 2, "lr": 0.01, "compress": "none"}
PROMPTS = [[11, 12, 13], [20, 21, 22, 23, 24, 25], [40]]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The files of the servers in a test: caches below ``caches``, or the files of the client (None)."""

    caches: Path | None
    own: tuple[Path, ...] = ()
    limit_bytes: int = 1 << 30


FILES = Offer(caches=None)


@dataclass
class Seen:
    """The observations of one worker of a run."""

    result: Any = None
    lines: list[str] = field(default_factory=list)
    received: dict[str, int] = field(default_factory=dict)  # bytes, by folder
    sent: list[int] = field(default_factory=list)  # bytes, by server


@contextmanager
def files_of(
    world: World, offer: Offer, settings: Any, adapter: str | None = None, *, generates: bool = False
) -> Iterator[tuple[dict[str, Any], str | None, Seen]]:
    """Exchange the manifest as a client and its servers do; the settings (JSON), the adapter, and what is seen."""
    seen = Seen()
    given = settings.to_json() if isinstance(settings, Settings) else dict(vars(settings))
    given = {name: value for name, value in given.items() if name != "pretrained" or not generates}
    if offer.caches is None:
        yield given, adapter, seen
        return
    if world.is_client:
        chosen = None if generates else task(settings.task)
        files = describe_files(settings.source, chosen, None if adapter is None else Path(adapter))
        world.gather([given, files.manifest()])
        with serve_files(files, world.control, seen.lines.append) as services:
            yield given, adapter, seen
        seen.sent = [service.sent_bytes for service in services]
        return
    given, manifest = world.gather(None)[0]
    cache = ModelCache(offer.caches / str(world.worker), offer.limit_bytes)
    placed = place_files(manifest, cache, offer.own, worker=world.worker)
    given = place_settings({**given, "adapter": adapter}, placed)
    adapter = given["adapter"]
    if not generates:
        given.pop("adapter")
    with fetch_files(placed, world.control, seen.lines.append) as fetched:
        yield given, adapter, seen
    seen.received = {name: each.received_bytes for name, each in fetched.items()}


def train_with(group: Any, offer: Offer, given: Mapping[str, Any], running: RunOptions | None = None) -> Seen:
    """Train; of several workers the last ones are servers without files, unless the offer says otherwise."""
    world, running = world_in(group), running or RunOptions()
    lm = task(str(given.get("task", "lm")))
    settings = resolve({"task": lm.name, "workers": world.workers, **SMALL, **given}, lm.defaults, device="cpu")
    if running.save is not None:
        running = replace(running, save_local=True)
    with files_of(world, offer, settings) as (mine, _, seen):
        if offer.caches is not None and not world.is_client:
            running = place_running(running)
        ears = Recorder()
        train(lm, Settings.from_json(mine), running, world, lambda: ears)
    seen.result = None if ears.end is None else (ears.end.parameters_sha256, [step.loss for step in ears.steps])
    return seen


def evaluate_with(
    group: Any, offer: Offer, run: Path | None, given: Mapping[str, Any], adapter: Path | None = None
) -> Seen:
    world = world_in(group)
    saved = None if adapter is None else SavedAdapter(adapter)
    chosen = {"compress": None, "workers": world.workers, "device": "cpu", **given}
    settings = resolve_evaluation(run, chosen, saved)
    if offer.caches is not None and not world.is_client and run is not None:
        run = place_running(RunOptions(save=run)).save
    with files_of(world, offer, settings, adapter and str(adapter)) as (mine, placed, seen):
        result: EvaluationResult = evaluate_on_worker(
            world,
            Settings.from_json(mine),
            run,
            None if placed is None else SavedAdapter(Path(placed)),
            "validation",
            task(settings.task),
        )
    seen.result = (result.found.loss, result.found.metric) if world.is_client else None
    return seen


def generate_with(group: Any, offer: Offer, given: Mapping[str, Any]) -> Seen:
    world = world_in(group)
    settings = GenerationSettings(workers=world.workers, max_new_tokens=8, device="cpu", **given)
    with files_of(world, offer, settings, settings.adapter, generates=True) as (mine, _, seen):
        mine = {name: value for name, value in mine.items() if name in GenerationSettings.__dataclass_fields__}
        prompts = [Prompt("", tokens) for tokens in PROMPTS] if world.is_client else None
        runs: list[GenerationRun] = generate(
            GenerationSettings(**mine), world, prompts, lambda *_: None, lambda tokenizer: None
        )
    seen.result = [run.tokens for run in runs]
    return seen


def layer_bytes(folder: Path, layers: Sequence[int]) -> int:
    """The bytes of these layers in a model's folder, as its files have them."""
    tensors = describe_files(Source(model=str(folder))).folders["model"][1].tensors
    marks = [f".{layer}." for layer in layers]
    return sum(spec_bytes(spec) for name, spec in tensors.items() if any(mark in name for mark in marks))
