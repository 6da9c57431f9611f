"""The command line: names the verbs; each is imported when it is called, so that --help need not wait for torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from thinpipe.version import __version__
from thinpipe.workers.forking import import_ahead

# Verb -> the function that carries it out, and the first line of its help.
VERBS = {
    "train": ("thinpipe.commands.train.command:train", "Train a model whose layers live on several workers."),
    "evaluate": (
        "thinpipe.commands.evaluate:evaluate",
        "Loss and accuracy of a model, a run's newest checkpoint or an adapter.",
    ),
    "generate": (
        "thinpipe.commands.generate:generate",
        "Texts from a model whose layers live on several workers.",
    ),
    "ablate": (
        "thinpipe.commands.ablate:ablate",
        "Train every combination of a plan; tables of mean, spread and worst seed.",
    ),
    "export": ("thinpipe.commands.export:export", "The model of a run as a folder of transformers."),
    "diff": ("thinpipe.commands.diff:diff", "What changed between two records that thinpipe wrote with --json."),
    "models": ("thinpipe.commands.models:models", "Which models of transformers can be cut into units."),
    "bench codecs": (
        "thinpipe.commands.bench_codecs:bench_codecs",
        "What each codec sends, loses and costs on this machine.",
    ),
    "bench ddp": ("thinpipe.commands.bench_ddp:bench_ddp", "Iteration time of DistributedDataParallel."),
    "bench link": ("thinpipe.commands.bench_link:bench_link", "How long messages take between two workers."),
    "bench pipeline": (
        "thinpipe.commands.bench_pipeline:bench_pipeline",
        "Pipelines against data-parallel and single-process training.",
    ),
}
# Verb -> what its workers run.
_WORKERS = {
    "train": "thinpipe.training.worker",
    "evaluate": "thinpipe.training.worker",
    "generate": "thinpipe.generation.worker",
}


def load(verb: str) -> Any:
    """The command of a verb, with its options."""
    module, _, function = VERBS[verb][0].partition(":")
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(verb.rpartition(" ")[2])(getattr(import_module(module), function))
    return typer.main.get_command(alone)


def start_server(verb: str, arguments: Sequence[str]) -> None:
    """Start the server that forks workers, if the verb will ask for some, while the verb itself is imported.

    What they will import is guessed from the arguments; a wrong guess costs only time.
    """
    given = dict(pairwise([*arguments, ""]))
    given |= {name: value for name, equals, value in (each.partition("=") for each in arguments) if equals}

    def has(*names: str) -> bool:
        return not given.keys().isdisjoint(names)

    if verb not in _WORKERS or has("--help", "--rank") or "RANK" in os.environ:
        return
    modules = [_WORKERS[verb], "thinpipe.codecs.kernels.cpu"]
    if has("--lora", "--adapter"):
        modules.append("peft")
    if verb != "train" or has("--model", "--config"):
        import_ahead(*modules, "transformers")
    elif has("--resume"):  # whose task its checkpoint knows
        import_ahead(*modules)
    else:
        import_ahead(*modules, "thinpipe.workloads.preload", THINPIPE_TASK=given.get("--task", "digits"))


class _Verbs(TyperGroup):
    """Lists verbs by their summaries, and loads the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        verb = " ".join(part for part in (self.name if self.name == "bench" else "", name) if part)
        start_server(verb, rest)
        return name, load(verb) if verb in VERBS else command, rest


app = typer.Typer(cls=_Verbs, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(cls=_Verbs, no_args_is_help=True, help="Measure: codecs, links, pipelines, data-parallel training.")
app.add_typer(bench, name="bench")
for _verb, (_, _summary) in VERBS.items():
    _group = bench if _verb.startswith("bench ") else app
    _group.command(_verb.rpartition(" ")[2], help=_summary)(lambda: None)


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
