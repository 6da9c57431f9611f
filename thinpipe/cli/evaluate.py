"""thinpipe evaluate: loss and accuracy of a model, a run or adapters on a data set."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import typer

from thinpipe.cli.replicas import worker_errors
from thinpipe.cli.terminal import OutputError, one_line_errors, takes, write_or_print
from thinpipe.cli.train.command import Asked as Training
from thinpipe.cli.train.resolve import join_machines
from thinpipe.comm.errors import WorkerError
from thinpipe.comm.membership import COMPLETE, member, say_remote
from thinpipe.lab.records import report
from thinpipe.lab.records.record import Record, check_writable, columns_of, figure, row_of
from thinpipe.options import OptionError, flags_in_errors, like, option, read
from thinpipe.train.checkpoints.best import follow_best
from thinpipe.train.generation.settings import Settings as Generation
from thinpipe.train.running import RunOptions, check_devices
from thinpipe.train.settings import PANELS, WHAT, Settings, Trained
from thinpipe.train.tasks.task import METRICS, DataError

KIND = "evaluate"
# Settings of a run that an evaluation keeps in addition to those of the model and data. The first four apply to any
# parallelism, the others only to the same one.
_KEPT = ("parallel", "batch_size", "amp", "seed", "workers", "layout", "client_layers", "chunks", "compress_forward")
# Options of a model that only training uses; runs and adapters record what was trained.
_TRAINING = ("lora", "lora_target", "lora_alpha", "lora_dropout", "freeze")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options in addition to task, data and model."""

    run: Path | None = option(
        "Folder of checkpoints of a run, one checkpoint, or DIR/best; its weights, data and options are used.",
        panel=WHAT,
        metavar="DIR",
        kind=Path,
        parse=follow_best,
        default=None,
    )
    adapter: str | None = like(Generation, "adapter", panel=WHAT, default=None)
    part: Literal["validation", "train"] = option("Part of the data to evaluate.", panel=WHAT, default="validation")
    parallel: Any = like(Settings, "parallel", default=None, usual="pipeline")
    workers: Any = like(Settings, "workers", default=None)
    layout: Any = like(Settings, "layout", default=None, usual="client-server")
    client_layers: Any = like(Settings, "client_layers", default=None)
    chunks: Any = like(Settings, "chunks", default=None)
    batch_size: Any = like(Settings, "batch_size", default=None)
    amp: Any = like(Settings, "amp", default=None)
    seed: Any = like(Settings, "seed", default=None, usual=0)
    device: Any = like(Settings, "device", default=None)
    threads: Any = like(Settings, "threads", default=None)
    compress: str | None = like(
        Training, "compress", help="Codec of activations, or a preset, as in 4bit.", default=None
    )
    link: Any = like(RunOptions, "link", default=None)
    patience_s: float = like(RunOptions, "patience_s", default=RunOptions.patience_s)
    json: Path | None = like(Training, "json", default=None)
    rank: int | None = like(Training, "rank", default=None)
    master: str | None = like(Training, "master", default=None)
    debug: bool = like(Training, "debug", default=False)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One evaluation. The codec is not a key, so that evaluations of different codecs can be compared."""

    task: str = figure("task", key=True)
    part: str = figure("part", key=True)
    samples: int = figure("samples", format=",d")
    loss: float = figure("loss\nnats", format=".4f", better="lower")
    perplexity: float | None = figure("perplexity", format=METRICS["perplexity"].format, better="lower")
    bits_per_byte: float | None = figure("bits/\nbyte", format=".3f", better="lower")
    accuracy: float = figure("accuracy", format=METRICS["accuracy"].format, better="higher")
    matthews: float | None = figure("matthews", format=METRICS["matthews"].format, better="higher")
    samples_per_s: float = figure("samples/s", format=".1f", better="higher")
    forward: str | None = figure("codec")
    wire_bytes: int | None = figure("wire\nbytes", format=",d", better="lower")


@takes(Asked, Trained, panels=PANELS, but=_TRAINING, titles={PANELS[3]: "Evaluation"})
def evaluate(**given: Any) -> None:
    """Compute loss and accuracy of a model, a run or an adapter.

    Runs the pipeline and the codecs of training, or one process, without
    gradients and optimizer. For texts also perplexity and bits per byte.

    On several machines, on each: thinpipe evaluate ... --workers 3 --rank N
    --master HOST:PORT

    Example: thinpipe evaluate --run run/ --compress 4bit
    """
    from thinpipe.lab.netem.network import check_launch, thin_network
    from thinpipe.launch.workers import run_workers
    from thinpipe.train.data import check_possible
    from thinpipe.train.models.saved_adapter import SavedAdapter
    from thinpipe.train.tasks.tasks import task as find_task

    with one_line_errors():
        asked = Asked(**read(Asked, given))
        if asked.debug:
            os.environ["THINPIPE_DEBUG"] = "1"
        join_machines(asked.rank, asked.master, given["workers"])
        adapter = None if asked.adapter is None else SavedAdapter(Path(asked.adapter))
        settings = _settled(asked.run, given, adapter)
        check_devices(settings)
        if given["samples"] is not None and asked.part != "train":
            raise OptionError("{samples} limits the training samples: give {part} train with it, or leave it out")
        RunOptions(link=asked.link, patience_s=asked.patience_s).check_with(settings)
        check_launch([settings.workers], [asked.link])
        me = member()
        if me is None:
            check_possible(find_task(settings.task), settings, adapter)
        if asked.json is not None and (me is None or me.rank == 0):
            check_writable(asked.json)
    workers = settings.workers if me is None else None
    options: dict[str, Any] = {"workers": workers, "patience_s": asked.patience_s}
    with worker_errors(), thin_network(asked.link, settings.workers) as network:
        outcome = run_workers(_work, settings, asked.run, adapter, asked.part, network=network, **options)[0]
    code = 2 if isinstance(outcome, str) else 0
    if isinstance(outcome, str):
        typer.echo(f"thinpipe: {outcome}", err=True)
    elif me is None or me.rank == 0:
        code = _finish(asked, settings, outcome)
    else:
        say_remote(COMPLETE)
    raise typer.Exit(code)


def _settled(run: Path | None, given: Mapping[str, Any], adapter: Any = None) -> Settings:
    """Resolve the settings of an evaluation: of a run with the given ones overridden, or new ones."""
    import torch

    from thinpipe.links.registry import link_codec
    from thinpipe.train.checkpoints.folder import check_exported, checkpoints, is_complete, newest_manifest
    from thinpipe.train.resolve import resolve
    from thinpipe.train.tasks.tasks import task as find_task

    chosen = {name: value for name, value in read(Settings, given).items() if value is not None}
    me = member()
    if me is not None:
        chosen["workers"] = me.size
    if adapter is not None:
        _check_alone(run, chosen)
        check_exported(str(adapter.folder), "adapter")
        chosen = adapter.completed(chosen)
    if run is not None:
        if not is_complete(run) and not checkpoints(run):
            raise OptionError(f"{{run}} is a folder that a run was saved in, or one checkpoint of it; {run} has none")
        saved = newest_manifest(run)[1].settings
        same = chosen.get("parallel", saved.parallel) == saved.parallel
        names = [each.name for each in fields(Trained)] + list(_KEPT if same else _KEPT[:4])
        kept = {name: getattr(saved, name) for name in names} | {"parallel": saved.parallel}
        if same and saved.parallel == "pipeline":
            kept["compress_forward"] = link_codec(
                saved.compress_forward
            ).evaluation_spec  # delta(...) needs samples that were seen before
        if given["compress"] is not None or saved.parallel == "data":
            kept.pop("compress_forward", None)
        chosen = kept | chosen
    elif chosen.get("model") is not None:
        check_exported(chosen["model"])
        chosen.setdefault("task", "lm")
    task = find_task(chosen.setdefault("task", "digits"))
    recipe = (task.model_recipe if chosen.get("model") else None) or task.recipe
    found = "cuda" if torch.cuda.is_available() else "cpu"
    settings = resolve(chosen | {"compress": given["compress"]}, recipe, device=found)
    if settings.parallel == "pipeline":
        _check_learned(settings.compress_forward, None if run is None else saved.compress_forward)
    return settings


def _check_learned(spec: str, trained: str | None) -> None:
    """Raise OptionError for a codec that learns in training, unless the run was trained with it."""
    from thinpipe.links.registry import link_codec

    if link_codec(spec).needs_basis and spec != trained:
        raise OptionError(
            f"{spec} learns while a model is trained through it, and this one was not: give {{compress}} a codec "
            "that learns nothing, as in 4bit or gauss:3"
        )


def _check_alone(run: Path | None, chosen: Mapping[str, Any]) -> None:
    """Raise OptionError for options that conflict with {adapter}: other weights, or none."""
    if run is not None:
        raise OptionError("{run} and {adapter} both bring weights: give one of them")
    if "config" in chosen:
        raise OptionError("{adapter} belongs to the weights of a model: leave out {config}")
    if not chosen.get("pretrained", True):
        raise OptionError("{adapter} belongs to the weights of a model: leave out {no_pretrained}")


def _work(settings: Settings, run: Path | None, adapter: Any, part: Any) -> Any:
    """Evaluate on this worker; return the client's results, or an error message."""
    import torch

    from thinpipe.train.engines.world import SetupError, join_world
    from thinpipe.train.tasks.tasks import task as find_task
    from thinpipe.train.worker import evaluate_model

    with flags_in_errors():
        world = join_world(settings.devices)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        try:
            task = world.together(lambda: find_task(settings.task))  # a user's own may not be importable everywhere
            return evaluate_model(task, settings, world, run=run, adapter=adapter, part=part)
        except SetupError as error:
            return str(error)
        except DataError as error:  # on one worker only; it ends the others
            raise WorkerError(str(error), code=2) from None


def _finish(asked: Asked, settings: Settings, outcome: Any) -> int:
    """Print the results and write the record; return the exit code."""
    from thinpipe.train.tasks.tasks import task as find_task

    found, metric = outcome.found, find_task(settings.task).metric
    is_pipeline = settings.parallel == "pipeline"
    figures = Figures(
        task=settings.task,
        part=asked.part,
        samples=outcome.samples,
        loss=found.loss,
        perplexity=found.metric if metric == "perplexity" else None,
        bits_per_byte=found.bits_per_byte,
        accuracy=found.accuracy,
        matthews=found.metric if metric == "matthews" else None,
        samples_per_s=outcome.samples / max(outcome.seconds, 1e-9),
        forward=settings.compress_forward if is_pipeline else None,
        wire_bytes=outcome.wire_bytes if is_pipeline else None,
    )
    report.show([report.Table(title="Evaluation", columns=columns_of(Figures), rows=[row_of(figures)])])
    if asked.json is None:
        return 0
    config = {"command": ["thinpipe", *sys.argv[1:]], **settings.to_json()}
    config |= {"run": asked.run and str(asked.run), "adapter": asked.adapter}
    config = {name: value for name, value in config.items() if value is not None}
    record = Record(kind=KIND, config=config, columns=columns_of(Figures), rows=(row_of(figures),))
    try:
        write_or_print(record, asked.json)
    except OutputError as error:
        typer.echo(f"thinpipe: {error}", err=True)
        return 1
    return 0
