"""thinpipe train: options to settings; the run itself is thinpipe.training's."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from thinpipe.commands.terminal import one_line_errors
from thinpipe.workloads.tasks import TASKS
from thinpipe.workloads.tasks import task as find_task

_WHAT, _WHERE, _LINKS, _HOW, _OUT, _SAVE, _MACHINES = (
    "What is trained",
    "Who computes what",
    "What travels",
    "How it is trained",
    "What comes out",
    "Checkpoints",
    "Several machines, and when something goes wrong",
)


def _option(panel: str, help: str, default: str | None = None, **more: Any) -> Any:
    """An option that is None unless given; its default is named, or the task's."""
    return typer.Option(help=help, rich_help_panel=panel, show_default=default or False, **more)


def train(
    task: Annotated[str | None, _option(_WHAT, f"One of {', '.join(TASKS)}.", "digits", metavar="NAME")] = None,
    data: Annotated[Path | None, _option(_WHAT, "Data on disk.", "embedded or downloaded", metavar="PATH")] = None,
    weights: Annotated[Path | None, _option(_WHAT, "Weights on disk to start from.", metavar="PATH")] = None,
    pretrained: Annotated[
        bool | None,
        typer.Option("--pretrained/--no-pretrained", help="Start from weights, or at random.", rich_help_panel=_WHAT),
    ] = None,
    image_size: Annotated[int | None, _option(_WHAT, "Width and height of images.", metavar="PIXELS")] = None,
    tokens: Annotated[int | None, _option(_WHAT, "Length of texts.", metavar="N")] = None,
    width: Annotated[float | None, _option(_WHAT, "Factor on the model's width.", metavar="X")] = None,
    samples: Annotated[
        int | None, _option(_WHAT, "Train on so many at most, for a quick look.", "all", metavar="N")
    ] = None,
    parallel: Annotated[
        Literal["pipeline", "data", "none"] | None,
        _option(_WHERE, "Layers on several workers, replicas of the model, or one process.", "pipeline"),
    ] = None,
    workers: Annotated[
        int | None, _option(_WHERE, "Workers to start here. Under torchrun: leave it out.", "2", metavar="N")
    ] = None,
    layout: Annotated[
        Literal["client-server", "linear"] | None,
        _option(_WHERE, "Worker 0 has the first and the last layers, or only the first.", "client-server"),
    ] = None,
    client_layers: Annotated[
        str | None, _option(_WHERE, "Units at both ends that stay with the client, as in 1,1.", metavar="A,B")
    ] = None,
    schedule: Annotated[
        Literal["gpipe", "1f1b"] | None,
        _option(_WHERE, "All forwards first, or backwards as soon as can be.", "gpipe"),
    ] = None,
    chunks: Annotated[
        int | None,
        _option(_WHERE, "Pieces of a batch that follow each other.", "the task's; 1 unless a pipeline", metavar="N"),
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option("--recompute", help="Compute activations twice instead of keeping them.", rich_help_panel=_WHERE),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, _option(_WHERE, "Where workers compute.", "auto: cuda if there is one")
    ] = None,
    threads: Annotated[int | None, _option(_WHERE, "Of each worker.", "cores / workers", metavar="N")] = None,
    compress: Annotated[
        str | None,
        _option(_LINKS, "Codec of both directions, or 8bit, 4bit, 2bit.", "8bit; none for data", metavar="SPEC"),
    ] = None,
    compress_forward: Annotated[
        str | None,
        _option(
            _LINKS, "Codec of activations; delta(SPEC) sends what changed of them.", "as --compress", metavar="SPEC"
        ),
    ] = None,
    compress_backward: Annotated[
        str | None, _option(_LINKS, "Codec of gradients.", "as --compress", metavar="SPEC")
    ] = None,
    error_feedback: Annotated[
        bool | None,
        typer.Option(
            "--error-feedback/--no-error-feedback",
            help="Replicas add what a codec lost of a gradient to the next one.",
            rich_help_panel=_LINKS,
            show_default="on",
        ),
    ] = None,
    delta_cache: Annotated[
        Path | None,
        _option(_LINKS, "Where delta(...) keeps its copies of samples.", "in memory", metavar="DIR"),
    ] = None,
    delta_cache_limit: Annotated[
        str | None, _option(_LINKS, "The most of them on one machine.", "4GiB", metavar="SIZE")
    ] = None,
    link: Annotated[
        str | None,
        _option(
            _LINKS,
            "Workers in network namespaces with links of this rate, as in 100mbit; needs root.",
            "as the machine is",
            metavar="RATE",
        ),
    ] = None,
    batch_size: Annotated[int | None, _option(_HOW, "Of all replicas together.", metavar="N")] = None,
    epochs: Annotated[int | None, _option(_HOW, "Passes over the data.", metavar="N")] = None,
    optimizer: Annotated[Literal["sgd", "adamw"] | None, _option(_HOW, "With momentum; or AdamW.")] = None,
    lr: Annotated[float | None, _option(_HOW, "Highest learning rate.", metavar="X")] = None,
    lr_schedule: Annotated[
        Literal["constant", "cosine", "polynomial"] | None,
        _option(_HOW, "constant, cosine or polynomial, after the warm-up.", metavar="NAME"),
    ] = None,
    warmup: Annotated[float | None, _option(_HOW, "Part of all steps in which it rises.", metavar="X")] = None,
    momentum: Annotated[float | None, _option(_HOW, "SGD's.", metavar="X")] = None,
    weight_decay: Annotated[float | None, _option(_HOW, "Pull of weights towards 0.", metavar="X")] = None,
    clip_norm: Annotated[
        float | None, _option(_HOW, "Largest norm of the gradients of all stages together.", metavar="X")
    ] = None,
    amp: Annotated[
        bool | None, typer.Option("--amp", help="bfloat16 where that is safe (autocast).", rich_help_panel=_HOW)
    ] = None,
    seed: Annotated[int | None, _option(_HOW, "Of weights, order, augmentation, dropout.", "0", metavar="N")] = None,
    steps: Annotated[int | None, _option(_HOW, "Stop after so many, for a quick look.", "all", metavar="N")] = None,
    log: Annotated[Path | None, _option(_OUT, "TensorBoard curves.", metavar="DIR")] = None,
    json: Annotated[Path | None, _option(_OUT, "The record; `thinpipe diff` compares two.", metavar="FILE")] = None,
    trace: Annotated[
        Path | None,
        _option(_OUT, "One step as a picture (.png) or for chrome://tracing (.json).", metavar="FILE"),
    ] = None,
    capture: Annotated[
        Path | None,
        _option(_OUT, "Activations and gradients, before compression, for `bench codecs --from`.", metavar="FILE"),
    ] = None,
    capture_steps: Annotated[
        str | None, _option(_OUT, "Which steps, as in 10,100.", "3, spread over the run", metavar="N,...")
    ] = None,
    capture_chunks: Annotated[int | None, _option(_OUT, "How many chunks of each.", "1", metavar="N")] = None,
    capture_limit: Annotated[str | None, _option(_OUT, "The most to write.", "1GiB", metavar="SIZE")] = None,
    save: Annotated[Path | None, _option(_SAVE, "Folder for checkpoints.", metavar="DIR")] = None,
    save_every: Annotated[int | None, _option(_SAVE, "Steps from one to the next.", "an epoch", metavar="N")] = None,
    keep: Annotated[int | None, _option(_SAVE, "Of the newest.", "2", metavar="N")] = None,
    save_local: Annotated[
        bool | None,
        typer.Option(
            "--save-local", help="The client keeps all of them: its folder need not be shared.", rich_help_panel=_SAVE
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        _option(_SAVE, "Go on where the run saved here stopped, with its options.", metavar="DIR"),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="Go on by itself when a worker dies.", rich_help_panel=_SAVE, metavar="N"),
    ] = 0,
    rank: Annotated[
        int | None, _option(_MACHINES, "The number of this worker, from 0, the client.", metavar="N")
    ] = None,
    master: Annotated[
        str | None, _option(_MACHINES, "Where worker 0 listens; the same on all machines.", metavar="HOST:PORT")
    ] = None,
    patience: Annotated[
        float | None,
        _option(_MACHINES, "Seconds to wait for a worker that is missing or silent.", "60", metavar="S"),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Errors with their tracebacks.", rich_help_panel=_MACHINES)
    ] = False,
) -> None:
    """Train a model whose layers live on several workers.

    First prints who holds what and what will travel; at the end, what it came
    to. Options left out are the task's recipe.

    On several machines, on each: thinpipe train ... --workers 3 --rank N
    --master HOST:PORT

    Example: thinpipe train --task digits --compress sort:8 --epochs 10
    """
    # Not at the top: the other verbs need not wait for what training needs.
    from thinpipe.workers.forking import import_ahead

    if rank is None and "RANK" not in os.environ:
        known = TASKS.get(task or "digits")
        import_ahead("thinpipe.training.worker", "thinpipe.codecs.kernels.cpu", *(known.modules if known else ()))
    from thinpipe.commands.train_run import already_there, carry_out
    from thinpipe.commands.train_settle import join_machines, parse_capture, parse_delta_cache, parse_rate, settle_run
    from thinpipe.commands.train_views import make_listener, preflight
    from thinpipe.training.data import check_possible
    from thinpipe.workers.launch import leave
    from thinpipe.workers.membership import PATIENCE_S, member

    if debug:
        os.environ["THINPIPE_DEBUG"] = "1"

    given: dict[str, Any] = {
        "task": task,
        "parallel": parallel,
        "workers": workers,
        "layout": layout,
        "client_layers": client_layers,
        "schedule": schedule,
        "chunks": chunks,
        "compress": compress,
        "compress_forward": compress_forward,
        "compress_backward": compress_backward,
        "error_feedback": error_feedback,
        "batch_size": batch_size,
        "epochs": epochs,
        "optimizer": optimizer,
        "lr": lr,
        "lr_schedule": lr_schedule,
        "warmup": warmup,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "clip_norm": clip_norm,
        "amp": amp,
        "recompute": recompute,
        "seed": seed,
        "device": None if device == "auto" else device,
        "threads": threads,
        "data": None if data is None else str(data.resolve()),
        "weights": None if weights is None else str(weights.resolve()),
        "pretrained": pretrained,
        "image_size": image_size,
        "tokens": tokens,
        "width": width,
        "samples": samples,
    }
    with one_line_errors():
        join_machines(rank, master, workers)
        settings, running = settle_run(
            given,
            resume,
            max_restarts,
            save=save,
            save_every=save_every,
            keep=keep,
            save_local=save_local,
            steps=steps,
            trace=trace,
            **parse_delta_cache(delta_cache, delta_cache_limit),
            capture=parse_capture(capture, capture_steps, capture_chunks, capture_limit),
            link=parse_rate(link),
            patience_s=PATIENCE_S if patience is None else patience,
        )
    if already_there(running):
        return
    with one_line_errors():
        me = member()
        if me is None:  # workers on several machines are there already; those who read data find out
            check_possible(find_task(settings.task), settings)
        if me is None or me.rank == 0:
            preflight(log=log, json=json, save=running.save, trace=trace, capture=capture)
    listener = partial(
        make_listener,
        config={"command": ["thinpipe", *sys.argv[1:]], **settings.to_json(), "link_mbit_per_s": running.link},
        seed=settings.seed,
        forward=settings.compress_forward,
        backward=settings.compress_backward,
        log=log,
        json=json,
    )
    code = carry_out(settings, running, listener, max_restarts=max_restarts)
    if me is not None:
        leave(code)  # this process is a worker
    raise typer.Exit(code)
