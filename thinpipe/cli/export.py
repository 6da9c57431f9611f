"""thinpipe export: the model of a run as a folder of transformers, from its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from thinpipe.cli.terminal import one_line_errors

_MOVABLE = ("model", "config", "tokenizer", "weights", "data")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of checkpoints, one checkpoint, or RUN/best.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where the run's --model is now, if it was moved.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where the run's --config is now, if it was moved.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where the run's --tokenizer is now, if it was moved.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run's --weights is now, if it was moved.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Where the run's --data is now, if it was moved.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into the weights of the model.")] = False,
) -> None:
    """Write the model of a run as a folder of transformers.

    The folder has what from_pretrained loads: config.json, safetensors in single
    precision, the tokenizer; and a model card with settings and results. The
    newest checkpoint without damage is used. No workers are needed; layers are
    read one at a time. For a run with --lora the folder has its adapters, in the
    format of peft, unless --merge is given.

    Example: thinpipe export run/ model/
    """
    moved = {"model": model, "config": config, "tokenizer": tokenizer, "weights": weights, "data": data}
    export_run(run, directory, moved, merge=merge)


def export_run(run: Path, directory: Path, given: Mapping[str, Any], *, merge: bool = False) -> None:
    """Export the newest undamaged checkpoint of a run. ``given`` are options with the new locations of moved files."""
    # Imported here, so that --help is fast.
    import torch

    from thinpipe.cli.train.preflight import Output, check_outputs
    from thinpipe.options import OptionError, read
    from thinpipe.system.files import read_folder
    from thinpipe.train.checkpoints.best import follow_best
    from thinpipe.train.checkpoints.folder import checkpoints, companions_of, is_complete, newest_whole
    from thinpipe.train.export import Export, export_checkpoint, saved_shape
    from thinpipe.train.models.adapters import adapt
    from thinpipe.train.models.save import check_new_folder
    from thinpipe.train.resolve import resolve_for_resume
    from thinpipe.train.settings import Settings
    from thinpipe.train.tasks.tasks import task as find_task

    with one_line_errors():
        run = follow_best(run)
        if not is_complete(run) and not checkpoints(run):
            raise OptionError(f"RUN is a folder that a run was saved in, or one checkpoint of it; {run} has none")
        check_new_folder(directory)  # before checkpoints are read, which takes a while
        path, manifest, damages = newest_whole(run)
        moved = {name: given[name] for name in _MOVABLE}
        settings = resolve_for_resume(read(Settings, moved), manifest.settings)
        settings.check_export(merge=merge)
        task = find_task(settings.task)
        torch.manual_seed(settings.seed)
        built = task.build(saved_shape(manifest, task, settings), settings.source)
        folder = companions_of(path)
        kept = {} if folder is None else read_folder(folder)
        prepared = Export.of(directory, built, task, settings, kept)
        adapted = adapt(built, settings.adapters, settings.freeze, settings.seed)
        if adapted.config is not None and not merge:
            prepared = prepared.of_adapter(adapted)
        check_outputs([Output("DIR", directory, check_new_folder, prepared.bytes)])
        lines = [f"{each.name} is damaged: {damage}; taking {path.name}" for each, damage in damages]
        for line in [*lines, *([] if prepared.notice is None else [prepared.notice])]:
            typer.echo(f"thinpipe: {line}", err=True)
        try:
            export_checkpoint(prepared, built, path, manifest, with_adapters=merge)
        except OSError as error:
            typer.echo(f"thinpipe: {directory} is not written: {error.strerror or error}", err=True)
            raise typer.Exit(1) from None
    progress = manifest.progress
    typer.echo(f"wrote {directory}: {prepared.form.name}, step {progress.step} of {progress.steps}")
