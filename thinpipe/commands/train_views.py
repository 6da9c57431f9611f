"""Who watches a training run: `preflight` before it, then one listener that tells all that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from thinpipe.commands.terminal import OutputError
from thinpipe.commands.watch.curves import Curves
from thinpipe.commands.watch.preflight import preflight
from thinpipe.commands.watch.record import RecordFile
from thinpipe.commands.watch.terminal import Terminal
from thinpipe.training.events import Epoch, Finished, Listener, Plan, Step

__all__ = ["Listeners", "OutputError", "make_listener", "preflight"]


def make_listener(
    *,
    config: Mapping[str, Any],
    seed: int,
    forward: str,
    backward: str,
    log: Path | None = None,
    json: Path | None = None,
) -> Listener:
    """The terminal; curves in ``log`` and a record in ``json`` if asked for. Can be sent to the client's process.

    ``config`` is the command and its settings, as the record keeps them; ``forward`` and ``backward`` are specs.
    """
    listeners: list[Listener] = [Terminal()]
    if log is not None:
        listeners.append(Curves(log))
    if json is not None:
        listeners.append(RecordFile(json, config=config, forward=forward, backward=backward, seed=seed))
    return Listeners(listeners)


class Listeners:
    """Several listeners as one.

    A disk that fills up or a pipe that is closed while the run goes on must not end it: that listener is told nothing
    more, and a line on stderr says so. A disk that fails before the first step or at the end is an error, after all
    others have been told: at the end an OutputError, and nobody hears of the run again, which has not failed.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = list(listeners)

    def planned(self, plan: Plan) -> None:
        for error in self._tell(lambda each: each.planned(plan)):
            if not isinstance(error, BrokenPipeError):
                raise error

    def stepped(self, step: Step) -> None:
        self._tell(lambda each: each.stepped(step))

    def evaluated(self, epoch: Epoch) -> None:
        self._tell(lambda each: each.evaluated(epoch))

    def noticed(self, line: str) -> None:
        self._tell(lambda each: each.noticed(line))

    def saved(self, step: int, path: str) -> None:
        self._tell(lambda each: each.saved(step, path))

    def save_failed(self, step: int, problem: str) -> None:
        self._tell(lambda each: each.save_failed(step, problem))

    def finished(self, end: Finished) -> None:
        lost = self._tell(lambda each: each.finished(end), last=True)
        self.listeners = []
        if lost:
            raise OutputError("; ".join(error.strerror or str(error) for error in lost))

    def failed(self, error: BaseException) -> None:
        self._tell(lambda each: each.failed(error))

    def _tell(self, call: Callable[[Listener], None], *, last: bool = False) -> list[OSError]:
        lost = []
        for each in list(self.listeners):
            try:
                call(each)
            except OSError as error:
                self.listeners.remove(each)
                lost.append(error)
                if not last:
                    typer.echo(f"thinpipe: {type(each).__name__} stops, the run does not: {error}", err=True)
        return lost
