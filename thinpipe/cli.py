"""The command line: registers the verbs, nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

from thinpipe.commands.ablate import ablate
from thinpipe.commands.bench_codecs import bench_codecs
from thinpipe.commands.bench_ddp import bench_ddp
from thinpipe.commands.bench_ddp_accuracy import bench_ddp_accuracy
from thinpipe.commands.bench_link import bench_link
from thinpipe.commands.bench_pipeline import bench_pipeline
from thinpipe.commands.diff import diff
from thinpipe.commands.train import train
from thinpipe.version import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measure: codecs, links, pipelines, data-parallel training.")
app.add_typer(bench, name="bench")
bench.command("codecs")(bench_codecs)
bench.command("ddp")(bench_ddp)
bench.command("ddp-accuracy")(bench_ddp_accuracy)
bench.command("link")(bench_link)
bench.command("pipeline")(bench_pipeline)
app.command("train")(train)
app.command("ablate")(ablate)
app.command("diff")(diff)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"thinpipe {__version__}")
        raise typer.Exit


@app.callback()
def thinpipe(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train a model whose layers live on several machines, over links too thin for it."""


def main() -> None:
    app()
