"""thinpipe bench ddp: iteration time of DistributedDataParallel on this machine, or on all that torchrun started."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from thinpipe.bench.ddp.settings import Settings
from thinpipe.bench.ddp.views import WIDE, heading_lines, model_lines, result_tables, row_lines
from thinpipe.bench.models import MODELS
from thinpipe.commands.replicas import check_workers, run_replicas
from thinpipe.commands.terminal import Outputs, one_line_errors
from thinpipe.measure.record import Record, Row
from thinpipe.workers.network import check_links, parse_link, thin_network

_WHAT, _DDP, _GRADIENTS, _HOW, _RESULTS = (
    "What is trained",
    "DistributedDataParallel",
    "How gradients travel",
    "How it is measured",
    "What comes out",
)


def bench_ddp(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(MODELS)}, or your own as package.module:function: given the batch size, it returns a "
            "model, a tuple of inputs, and a function from output to loss. Repeat for several.",
            rich_help_panel=_WHAT,
            show_default="resnet50",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Examples per replica.", rich_help_panel=_WHAT)
    ] = 32,
    image_size: Annotated[
        int, typer.Option(min=32, metavar="PIXELS", help="Width and height of images.", rich_help_panel=_WHAT)
    ] = 224,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Length of texts.", rich_help_panel=_WHAT)] = 128,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of weights and data.", rich_help_panel=_WHAT)
    ] = "float32",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Replicas to start on this machine. Under torchrun: leave it out.",
            rich_help_panel=_DDP,
            show_default="one per GPU; 2 on CPU",
        ),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Where replicas compute.", rich_help_panel=_DDP, show_default="cuda where there is one"),
    ] = None,
    backend: Annotated[
        Literal["gloo", "nccl"] | None,
        typer.Option(
            help="What joins them.", rich_help_panel=_DDP, show_default="nccl if each has its own GPU, else gloo"
        ),
    ] = None,
    link: Annotated[
        str,
        typer.Option(
            metavar="RATE",
            help="Replicas here with links of this rate, as in 100mbit; needs root. Under torchrun: what the link is, "
            "for the record.",
            rich_help_panel=_DDP,
            show_default="as it is",
        ),
    ] = "none",
    bucket_cap_mb: Annotated[
        float,
        typer.Option(min=0.001, metavar="MIB", help="Gradients that travel together.", rich_help_panel=_DDP),
    ] = 25,
    static_graph: Annotated[
        bool, typer.Option("--static-graph", help="Promise that every iteration is alike.", rich_help_panel=_DDP)
    ] = False,
    gradient_as_bucket_view: Annotated[
        bool,
        typer.Option("--gradient-as-bucket-view", help="Gradients live in the buckets.", rich_help_panel=_DDP),
    ] = False,
    compress: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Through thinpipe's hook with this codec and error feedback, as in uniform:8 or power:4.",
            rich_help_panel=_GRADIENTS,
            show_default="no hook",
        ),
    ] = None,
    hook: Annotated[
        Literal["fp16", "bf16", "powersgd"] | None,
        typer.Option(help="Through a hook of torch's instead.", rich_help_panel=_GRADIENTS, show_default="no hook"),
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=1, metavar="N", help="Iterations that do not count.", rich_help_panel=_HOW)
    ] = 5,
    iterations: Annotated[int, typer.Option(min=1, metavar="N", help="Iterations that do.", rich_help_panel=_HOW)] = 20,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep all times; `thinpipe diff` reads it.", rich_help_panel=_RESULTS),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the tables as a page.", rich_help_panel=_RESULTS)
    ] = None,
) -> None:
    """Iteration time of DistributedDataParallel.

    One replica without DDP, then groups of 1, 2, 4, ... and all replicas, each
    while the others wait. A group 2M/8G is 2 machines with 8 GPUs each (C: on
    CPU). sec/iter is that of the slowest replica, ex/sec are examples of one.

    On several machines: torchrun ... -m thinpipe bench ddp, on each.

    Example: thinpipe bench ddp --workers 2 --model resnet50 --image-size 64
    """
    with one_line_errors():
        mbit_per_s = parse_link(link)
    settings = Settings(
        models=tuple(dict.fromkeys(model or ["resnet50"])),
        batch_size=batch_size,
        image_size=image_size,
        tokens=tokens,
        dtype=dtype,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        backend=backend,
        link_mbit_per_s=mbit_per_s,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph,
        gradient_as_bucket_view=gradient_as_bucket_view,
        compress=compress,
        hook=hook,
        warmup=warmup,
        iterations=iterations,
    )
    outputs = Outputs(json=json, markdown=markdown)
    with one_line_errors():
        settings.check()
        outputs.check()
        count = check_workers(workers, settings.device)
        shaped = None if count is None else mbit_per_s  # under torchrun the link is there already
        check_links([shaped])
    with thin_network(shaped, count or 1) as network:
        record = run_replicas(_replica, settings, ["thinpipe", *sys.argv[1:]], workers=count, network=network)
    if record is not None:
        outputs.save(record, result_tables(record), "Iteration time of DistributedDataParallel")


def _replica(settings: Settings, command: Sequence[str]) -> Record | None:
    """What every replica runs; the first one prints as it goes."""
    from thinpipe.bench.ddp.iterations import measure_iterations

    printer = _Printer()
    return measure_iterations(settings, command, on_start=printer.start, on_row=printer.row)


class _Printer:
    """Shows every row as soon as it is known: a run may take hours."""

    def __init__(self) -> None:
        self._model: str | None = None
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE

    def start(self, record: Record) -> None:
        self._print(heading_lines(record))

    def row(self, row: Row) -> None:
        if row["model"] != self._model:
            self._print([*([] if self._model is None else [""]), *model_lines(row, self._width)])
            self._model = row["model"]
        self._print(row_lines(row, self._width))

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(line, flush=True)
