"""thinpipe export: the model of a run as a folder of transformers, from its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from thinpipe.cli.terminal import one_line_errors, takes
from thinpipe.options import flag, option, options_of, read
from thinpipe.train.settings import Trained

_PANEL = "Options"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of the command itself."""

    merge: bool = option("Merge adapters into the weights of the model.", panel=_PANEL, at_end=True, default=False)


# Files that the run has read, and that may be elsewhere now.
_MOVED = [
    replace(each, help=f"Where the run's {flag(each.name)} is now, if it was moved.", panel=_PANEL, default_text="")
    for each in options_of(Trained).values()
    if each.movable and each.per_machine
]


@takes(_MOVED, ExportOptions, panels=[_PANEL])
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of checkpoints, one checkpoint, or RUN/best.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    **given: Any,
) -> None:
    """Write the model of a run as a folder of transformers.

    The folder has what from_pretrained loads: config.json, safetensors in single
    precision, the tokenizer; and a model card with settings and results. The
    newest checkpoint without damage is used. No workers are needed; layers are
    read one at a time. For a run with --lora the folder has its adapters, in the
    format of peft, unless --merge is given.

    Example: thinpipe export run/ model/
    """
    export_run(run, directory, given, merge=ExportOptions(**read(ExportOptions, given)).merge)


def export_run(run: Path, directory: Path, given: Mapping[str, Any], *, merge: bool = False) -> None:
    """Export the newest undamaged checkpoint of a run. ``given`` are options with the new locations of moved files."""
    from thinpipe.train.checkpoint_export import prepare_export  # here, so that --help is fast

    moved = {each.name: given.get(each.name) for each in _MOVED}
    with one_line_errors():
        prepared = prepare_export(run, directory, moved, merge=merge)
        for line in prepared.notices:
            typer.echo(f"thinpipe: {line}", err=True)
        try:
            prepared.write()
        except OSError as error:
            typer.echo(f"thinpipe: {directory} is not written: {error.strerror or error}", err=True)
            raise typer.Exit(1) from None
    typer.echo(f"wrote {directory}: {prepared.summary}")
