"""The runner of commands whose work is done by workers: train, evaluate, generate.

1  join the other machines, if there are any, and resolve the options; an invalid one is one line and exit code 2
2  the client checks what it can before the workers start: files, models, outputs
3  start the workers, inside the emulated network if there is one, or become the worker that this process is
4  map the client's outcome to output, record and exit code
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer

from thinpipe.cli.replicas import worker_errors
from thinpipe.cli.terminal import one_line_errors
from thinpipe.comm.membership import COMPLETE, become_member, become_served, member, print_remote
from thinpipe.options import OptionError, read
from thinpipe.system.files import OutputError
from thinpipe.system.sanitize import printable
from thinpipe.train.tasks.panels import machine_option, output_option

_servers: list[Any] = []  # of this command, if it has any: what ``start`` joins

Options = TypeVar("Options", bound="CommandOptions")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The other machines of a run: servers of `thinpipe serve`, or workers that are started by hand."""

    servers: str | None = machine_option(
        "Tickets of servers, as `thinpipe serve` prints them; they need no options, and the client is worker 0.",
        metavar="TICKET,...",
        default=None,
    )
    listen: str | None = machine_option(
        "Wait here for servers, {workers} N less one, and print the ticket for them; port 7000 if left out.",
        metavar="HOST:PORT",
        default=None,
    )
    address: str | None = machine_option(
        "Name or address for the ticket of {listen}, if it is not that of this machine.",
        metavar="HOST[:PORT]",
        advanced=True,
        default=None,
    )
    rank: int | None = machine_option(
        "Rank of this worker, on a private network: all workers are started by hand; 0 is the client.",
        metavar="N",
        advanced=True,
        default=None,
    )
    master: str | None = machine_option(
        "Address of worker 0, the same on all machines.", metavar="HOST:PORT", advanced=True, default=None
    )


@dataclass(frozen=True, kw_only=True)
class CommandOptions(MachineOptions):
    """Options of every command of this module."""

    json: Path | None = output_option(
        "File for the record; `thinpipe diff` compares two.", metavar="FILE", default=None
    )
    debug: bool = machine_option("Show tracebacks of errors.", at_end=True, advanced=True, default=False)


@contextmanager
def resolving(kind: type[Options], given: Mapping[str, Any]) -> Iterator[Options]:
    """Yield the command's own options; join the other machines, and report invalid options of the block in one line."""
    with one_line_errors():
        options = kind(**read(kind, given))
        if options.debug:
            os.environ["THINPIPE_DEBUG"] = "1"
        if options.servers is not None or options.listen is not None:
            join_servers(options, given)
        else:
            join_machines(options.rank, options.master, given["workers"])
        yield options


def join_servers(options: CommandOptions, given: Mapping[str, Any]) -> None:
    """Make this process worker 0 of a run whose servers are found by the options."""
    from thinpipe.train.serve.client import Servers, find_servers

    for name in ("rank", "master", "link"):
        if given.get(name) is not None:
            raise OptionError(f"{{servers}} and {{listen}} join machines by tickets: leave out {{{name}}}")
    if member() is not None:
        raise OptionError("torchrun has started the workers already: leave out {servers} and {listen}")
    found: Servers = find_servers(
        options.servers,
        options.listen,
        options.address,
        given["workers"],
        chooses_devices=given.get("device") is None,
        spares=given.get("mirror_every") is not None,
    )
    become_served(0, found.count + 1)
    _servers.append(found)


def join_machines(rank: int | None, master: str | None, workers: int | None) -> None:
    """Make this process one of the workers on several machines, if the options are given."""
    if rank is None and master is None:
        return
    if rank is None or master is None or workers is None:
        raise OptionError(
            "on several machines every worker needs its rank, the address of worker 0, and the number of workers: "
            "{rank} N {master} HOST:PORT {workers} N, on each"
        )
    if member() is not None:
        raise OptionError("torchrun has given this worker its rank already: leave out {rank} and {master}")
    become_member(rank, workers, master)


def is_client() -> bool:
    """Return True on the process that checks, prints and records: on several machines, the command of rank 0."""
    me = member()
    return me is None or me.rank == 0


def start(
    main: Callable[..., Any],
    settings: Any,
    *args: Any,
    processes: int,
    running: Any,
    private: Any = None,
    end: Any = None,
) -> Any:
    """Call ``main(world, settings, *args)`` on all workers and return the first outcome of this machine.

    ``running`` has the emulated ``link`` and ``patience_s``; ``private`` is one more argument, for the client only;
    ``end`` is that of ``run_workers``.
    """
    from thinpipe.lab.netem.network import thin_network
    from thinpipe.launch.workers import run_here, run_workers
    from thinpipe.train.worker import run_on_worker

    if _servers:
        from thinpipe.train.serve.jobs import Job

        offered = Job(main, settings, args)
        if offered.recovers:
            return run_here(_servers[-1].run, offered, running.patience_s)
        with _servers[-1].joined(offered, running.patience_s) as (mesh, job):
            arguments = (run_on_worker, job.main, job.settings, *job.arguments)
            return run_workers(*arguments, patience_s=running.patience_s, end=end, private=private, mesh=mesh)[0]
    workers = processes if member() is None else None
    with thin_network(running.link, processes) as network:
        return run_workers(
            run_on_worker,
            main,
            settings,
            *args,
            workers=workers,
            network=network,
            patience_s=running.patience_s,
            end=end,
            private=private,
        )[0]


def run_once(show: Callable[[Any], int], main: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Run as ``start`` does, without restarts; call ``show`` with the client's result, and exit with its code."""
    with worker_errors():
        outcome = start(main, *args, **options)
    if outcome.code:
        typer.echo(f"thinpipe: {printable(outcome.message)}", err=True)
    elif is_client():
        raise typer.Exit(show(outcome.result))
    else:
        print_remote(COMPLETE)
    raise typer.Exit(outcome.code)


def write_record(path: Path | None, kind: str, config: Mapping[str, Any], rows: Sequence[Any]) -> int:
    """Write the record of these rows, if there is a path, and return the exit code. ``config`` without None."""
    from thinpipe.lab.records.output import write_or_print
    from thinpipe.lab.records.record import Record, columns_of, row_of

    if path is None:
        return 0
    config = {"command": ["thinpipe", *sys.argv[1:]], **config}
    table = columns_of(type(rows[0]))
    try:
        write_or_print(Record(kind=kind, config=config, columns=table, rows=tuple(map(row_of, rows))), path)
    except OutputError as error:
        typer.echo(f"thinpipe: {error}", err=True)
        return 1
    return 0
