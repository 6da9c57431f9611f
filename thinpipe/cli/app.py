"""The command-line application: the table of commands, each imported when it is called, so that --help is fast."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer

from thinpipe.cli.help import SETTINGS, CommandGroup, Verb
from thinpipe.launch.forking import import_ahead
from thinpipe.version import __version__

# Command -> its function, and the first line of its help.
VERBS = {
    "train": ("thinpipe.cli.train:train", "Train a model whose layers are on several workers."),
    "evaluate": ("thinpipe.cli.evaluate:evaluate", "Compute loss and accuracy of a model, a run or an adapter."),
    "generate": ("thinpipe.cli.generate:generate", "Generate texts with a model on several workers."),
    "serve": ("thinpipe.cli.serve:serve", "Hold layers for clients elsewhere, over encrypted links."),
    "plan": ("thinpipe.cli.planning:plan", "Predict whether a pipeline pays, and how to set it up."),
    "ablate": ("thinpipe.cli.ablate:ablate", "Train every combination of a plan, and compare the results."),
    "export": ("thinpipe.cli.export:export", "Write the model of a run as a folder of transformers."),
    "diff": ("thinpipe.cli.diff:diff", "Compare two records of the same kind, written with --json."),
    "models": ("thinpipe.cli.models:models", "List the models of transformers that can be cut into units."),
    "peers": ("thinpipe.cli.peers:peers", "List the machines that may connect to this one."),
    "bench codecs": (
        "thinpipe.cli.bench:bench_codecs",
        "Measure size, error and time of each codec on this machine.",
    ),
    "bench ddp": ("thinpipe.cli.bench:bench_ddp", "Measure the iteration time of DistributedDataParallel."),
    "bench link": ("thinpipe.cli.bench:bench_link", "Measure transfer times between two workers."),
    "bench pipeline": (
        "thinpipe.cli.bench:bench_pipeline",
        "Compare pipelines with data-parallel and single-process training.",
    ),
}
# Command -> the module that its workers run.
_WORKERS = {
    "train": "thinpipe.train.worker",
    "evaluate": "thinpipe.train.evaluation",
    "generate": "thinpipe.train.generation.printing",
}
# Options of commands whose other workers are started elsewhere, or that start none.
_ELSEWHERE = ("--help", "--help-all", "--rank", "--servers", "--listen")
_PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # rich's tables truncate option names at 80 columns
}


def load(verb: str) -> Any:
    """Import a command and return it with its options."""
    module, _, function = VERBS[verb][0].partition(":")
    alone = typer.Typer(**_PLAIN)
    name = verb.rpartition(" ")[2]
    alone.command(name, cls=Verb, context_settings=SETTINGS)(getattr(import_module(module), function))
    return typer.main.get_command(alone)


def start_server(verb: str, arguments: Sequence[str]) -> None:
    """Start the fork server of workers, if the command will need it, while the command itself is imported.

    The modules to preload are guessed from the arguments; a wrong guess costs only time.
    """
    given = dict(pairwise([*arguments, ""]))
    given |= {name: value for name, equals, value in (each.partition("=") for each in arguments) if equals}

    def has(*names: str) -> bool:
        return not given.keys().isdisjoint(names)

    if verb not in _WORKERS or has(*_ELSEWHERE) or "RANK" in os.environ:
        return
    modules = [_WORKERS[verb], "thinpipe.codecs.kernels.cpu"]
    if has("--lora", "--adapter"):
        modules.append("peft")
    if verb != "train" or has("--model", "--config"):
        import_ahead(*modules, "transformers")
    elif has("--resume"):  # the task is in the checkpoint
        import_ahead(*modules)
    else:
        import_ahead(*modules, "thinpipe.train.tasks.preload", THINPIPE_TASK=given.get("--task", "digits"))


class _Verbs(CommandGroup):
    """A group that lists commands by their summaries, and imports a command when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        verb = " ".join(part for part in (self.name if self.name == "bench" else "", name) if part)
        start_server(verb, rest)
        return name, load(verb) if verb in VERBS else command, rest


app = typer.Typer(cls=_Verbs, no_args_is_help=True, **_PLAIN)
bench = typer.Typer(
    cls=_Verbs, no_args_is_help=True, **_PLAIN, help="Measure codecs, links, pipelines and data-parallel training."
)
app.add_typer(bench, name="bench")
for _verb, (_, _summary) in VERBS.items():
    _group = bench if _verb.startswith("bench ") else app
    _group.command(_verb.rpartition(" ")[2], help=_summary)(lambda: None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinpipe {__version__}")
        raise typer.Exit


@app.callback()
def thinpipe(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train a model whose layers are on several machines, joined by slow links."""
