"""Execution of a training run from the command line: restarts, and the report of its end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from thinpipe.cli.command_runner import is_client, start
from thinpipe.cli.export import export_run
from thinpipe.comm.errors import Interrupted, Terminated, WorkerError, ended_by, leave
from thinpipe.comm.membership import COMPLETE, is_served, member, print_remote
from thinpipe.system.sanitize import printable
from thinpipe.train.checkpoints.folder import checkpoints, newest, newest_manifest
from thinpipe.train.checkpoints.part import DamagedError, verify_part
from thinpipe.train.events import Listener
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import Task, metric_text
from thinpipe.train.tasks.tasks import task
from thinpipe.train.worker import train_on_worker


def run_with_restarts(
    settings: Settings,
    running: RunOptions,
    listener: Callable[[], Listener],
    *,
    find_task: Callable[[str], Task] = task,
) -> int:
    """Run to the end and return the exit code; report a worker's failure, or restart up to ``max_restarts`` times."""

    def end(cause: str) -> None:
        """Exit this process, which is a worker whose main thread may be blocked forever."""
        leave(_report(1, cause, running))

    for restarts_left in range(running.max_restarts, -1, -1):
        try:
            arguments = (settings, running, listener, find_task)
            outcome = start(
                train_on_worker, *arguments, processes=running.processes(settings), running=running, end=end
            )
        except KeyboardInterrupt as error:
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            return _report(128 + number, ended_by(number), running)
        except Terminated as error:
            return _report(error.code, ended_by(error.code - 128), running)
        except WorkerError as error:
            if not restarts_left or error.code != 1:  # bad input or a signal: a restart would not help
                return _report(error.code, str(error), running)
            again = running.save if running.save is not None and checkpoints(running.save) else running.resume
            typer.echo(f"thinpipe: {error}", err=True)
            typer.echo(
                f"thinpipe: starting again from {_last_checkpoint(running) or 'the beginning'}; "
                f"restarts left: {restarts_left - 1}",
                err=True,
            )
            running = replace(running, resume=again)  # a folder: a damaged checkpoint is skipped
        else:
            began = running if outcome.code != 2 else None  # 2: invalid options; the run did not begin
            if outcome.code:
                return _report(outcome.code, outcome.message, began)
            print_remote(COMPLETE)
            return 0
    raise AssertionError("the last restart returns")


def already_there(settings: Settings, running: RunOptions, given: Mapping[str, Any]) -> bool:
    """Return True if a run to be resumed is complete; then print its result, and export it if configured.

    ``given`` are options by their names as on the command line.
    """
    if running.resume is None or (running.save_local and member() is not None and not is_served()):
        return False  # with --save-local only the client has checkpoints, and other workers would wait for it
    path, manifest = newest_manifest(running.resume)
    progress = manifest.progress
    stopped = progress.stops_early(settings.early_stopping)
    if progress.step < running.last_step(progress.steps) and not stopped:
        return False
    try:
        for part in manifest.parts:
            verify_part(path, part)
    except DamagedError:
        return False  # the workers report it, and use an older one
    if is_client():
        state = "complete" if progress.is_complete else f"at step {progress.step} of {progress.steps} already"
        state += " and has stopped early" if stopped and not progress.is_complete else ""
        metric = metric_text(progress.metric_name, progress.metric)
        best = metric_text(progress.metric_name, progress.best_metric)
        typer.echo(f"this run is {state}: {path}")
        typer.echo(
            f"{progress.metric_name} {metric}, best {best}, validation loss {progress.validation_loss:.4f}, "
            f"train loss {progress.train_loss:.4f}"
        )
        typer.echo(f"parameters sha256 {progress.parameters_sha256}")
        if running.export is not None:
            export_run(path, running.export, given, merge=running.merge)
    return True


def _report(code: int, message: str, running: RunOptions | None) -> int:
    """Report how a run ended and, if it had begun, its last checkpoint; return the exit code."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # show the cursor, which a killed progress bar has hidden
    typer.echo(f"thinpipe: {printable(message)}", err=True)
    last = None if running is None else _last_checkpoint(running)
    # Bad input ends a run before the first checkpoint, and with --save-local only the client has checkpoints.
    is_known = running is not None and code != 2 and (is_client() or not running.save_local)
    if running is not None and (last is not None or is_known):
        typer.echo(f"thinpipe: {_checkpoint_text(running, last)}", err=True)
    return code


def _checkpoint_text(running: RunOptions, last: Path | None) -> str:
    if last is not None:
        return f"the last checkpoint is {last}; go on with: thinpipe train --resume {last.parent}"
    remedy = "; name a folder for checkpoints with --save DIR" if running.save is None else ""
    return f"no checkpoint was written{remedy}"


def _last_checkpoint(running: RunOptions) -> Path | None:
    found = [] if running.save is None else checkpoints(running.save)
    if found:
        return found[-1]
    return running.resume if running.resume is None or not checkpoints(running.resume) else newest(running.resume)
