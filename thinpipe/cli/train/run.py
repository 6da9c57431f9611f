"""Execution of a training run from the command line: starting workers, restarts, and the report of its end."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer

from thinpipe.cli.export import export_run
from thinpipe.cli.terminal import OutputError
from thinpipe.cli.train.preflight import preflight
from thinpipe.cli.train.record import metric_text
from thinpipe.comm.errors import Interrupted, StoppedTogether, Terminated, WorkerError, ended_by, leave
from thinpipe.comm.membership import COMPLETE, member, say_remote
from thinpipe.lab.netem.network import thin_network
from thinpipe.options import flags_in_errors
from thinpipe.system.sanitize import printable
from thinpipe.train.checkpoints.folder import checkpoints, newest, newest_manifest
from thinpipe.train.checkpoints.part import DamagedError, verify_part
from thinpipe.train.engines.finite import NotFiniteError
from thinpipe.train.events import Listener
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import DataError, Task
from thinpipe.train.tasks.tasks import task


@dataclass(frozen=True)
class Outcome:
    """The exit code and message of a worker's run, unless the worker failed."""

    code: int
    message: str = ""


def carry_out(
    settings: Settings,
    running: RunOptions,
    listener: Callable[[], Listener],
    *,
    find_task: Callable[[str], Task] = task,
) -> int:
    """Run to the end and return the exit code; report a worker's failure, or restart up to ``max_restarts`` times."""
    from thinpipe.launch.workers import run_workers

    workers = None if member() is not None else running.processes(settings)

    def end(cause: str) -> None:
        """Exit this process, which is a worker whose main thread may be blocked forever."""
        leave(_tell(1, cause, running))

    for restarts_left in range(running.max_restarts, -1, -1):
        try:
            with thin_network(running.link, running.processes(settings)) as network:
                arguments = (find_task, settings, running, listener)
                options: dict[str, Any] = {"network": network, "patience_s": running.patience_s, "end": end}
                outcome = run_workers(_work, *arguments, workers=workers, **options)[0]
        except KeyboardInterrupt as error:
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            return _tell(128 + number, ended_by(number), running)
        except Terminated as error:
            return _tell(error.code, ended_by(error.code - 128), running)
        except WorkerError as error:
            if not restarts_left or error.code != 1:  # bad input or a signal: a restart would not help
                return _tell(error.code, str(error), running)
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
                return _tell(outcome.code, outcome.message, began)
            say_remote(COMPLETE)
            return 0
    raise AssertionError("the last restart returns")


def already_there(running: RunOptions, given: Mapping[str, Any]) -> bool:
    """Return True if a run to be resumed is complete; then print its result, and export it if configured.

    ``given`` are options by their names as on the command line.
    """
    if running.resume is None or (running.save_local and member() is not None):
        return False  # with --save-local only the client has checkpoints, and other workers would wait for it
    path, manifest = newest_manifest(running.resume)
    progress = manifest.progress
    if progress.step < running.last_step(progress.steps):
        return False
    try:
        for part in manifest.parts:
            verify_part(path, part)
    except DamagedError:
        return False  # the workers report it, and use an older one
    if _speaks():
        state = "complete" if progress.is_complete else f"at step {progress.step} of {progress.steps} already"
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


def _work(
    find_task: Callable[[str], Task], settings: Settings, running: RunOptions, listener: Callable[[], Listener]
) -> Outcome:
    """Train on this worker."""
    with flags_in_errors():
        return _train(find_task, settings, running, listener)


def _train(
    find_task: Callable[[str], Task], settings: Settings, running: RunOptions, listener: Callable[[], Listener]
) -> Outcome:
    from thinpipe.train.checkpoints.resume import adopt_client_settings
    from thinpipe.train.checkpoints.saving import UnsavedError
    from thinpipe.train.engines.world import SetupError, join_world
    from thinpipe.train.worker import train

    # torch prints its schedule when a stage raises; the error alone is more useful.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    here = join_world(settings.devices)
    settings, running = adopt_client_settings(settings, running, here)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    check_room = partial(_check_room, running)
    try:
        chosen = here.together(lambda: find_task(settings.task))  # a user's own may not be importable everywhere
        train(chosen, settings, running, here, listener, check_room)
    except SetupError as error:
        return Outcome(2, str(error))
    except DataError as error:  # on one worker only; it ends the others
        raise WorkerError(str(error), code=2) from None
    except (NotFiniteError, OutputError, UnsavedError) as error:
        return Outcome(1, str(error))
    except StoppedTogether as error:
        who = "" if error.worker is None else f"worker {error.worker} was "
        return Outcome(128 + error.number, who + ended_by(error.number))
    return Outcome(0)


def _check_room(running: RunOptions, sizes: Mapping[str, int]) -> None:
    capture = None if running.capture is None else running.capture.path
    preflight(save=running.save, capture=capture, export=running.export, sizes=sizes)


def _tell(code: int, message: str, running: RunOptions | None) -> int:
    """Report how a run ended and, if it had begun, its last checkpoint; return the exit code."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # show the cursor, which a killed progress bar has hidden
    typer.echo(f"thinpipe: {printable(message)}", err=True)
    last = None if running is None else _last_checkpoint(running)
    # Bad input ends a run before the first checkpoint, and with --save-local only the client has checkpoints.
    is_known = running is not None and code != 2 and (_speaks() or not running.save_local)
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


def _speaks() -> bool:
    """Return True on the process that prints: on several machines, the command of rank 0."""
    me = member()
    return me is None or me.rank == 0
