"""thinpipe serve: a server that holds layers of runs whose options, files and data are on a client elsewhere."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from thinpipe.cli.terminal import one_line_errors, takes
from thinpipe.comm.errors import Interrupted, ended_by
from thinpipe.options import OptionError, between, option, read
from thinpipe.system.sizes import parse_size

PANELS = CONNECTION, LIMITS, RUN = "Connection", "Limits", "Run"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the owner of a server."""

    listen: str | None = option(
        "Listen here for clients, and print a ticket for them; port 7000 if left out. With a TICKET: where other "
        "servers of the run may connect.",
        panel=CONNECTION,
        metavar="HOST:PORT",
        default=None,
    )
    address: str | None = option(
        "Name or address for the ticket, if it is not that of this machine.",
        panel=CONNECTION,
        metavar="HOST[:PORT]",
        default=None,
    )
    name: str | None = option(
        "Name of this server in messages.", panel=CONNECTION, metavar="NAME", default_text="the host name", default=None
    )
    allow: tuple[str, ...] = option(
        "Fingerprint of a client's key; only those are admitted. Repeatable.",
        panel=CONNECTION,
        metavar="KEY",
        kind=list[str],
        parse=lambda keys: tuple(keys) or None,
        default_text="every client with a ticket",
        default=(),
    )
    memory: int | None = option(
        "Memory that a run may allocate; more ends the run. Not counted: GPU memory.",
        panel=LIMITS,
        metavar="SIZE",
        default_text="what is free when it starts",
        parse=parse_size,
        default=None,
    )
    threads: int | None = option(
        "Threads that a run may use.",
        panel=LIMITS,
        metavar="N",
        default_text="the client's choice",
        rule=between(1, 1024),
        default=None,
    )
    disk: int = option(
        "Size of the cache of model files.",
        panel=LIMITS,
        metavar="SIZE",
        default_text="50GB",
        parse=parse_size,
        default=50 * 10**9,
    )
    cache: Path | None = option(
        "Folder of the cache, the only one that runs read and write.",
        panel=LIMITS,
        metavar="DIR",
        default_text="~/.cache/thinpipe",
        default=None,
    )
    models: Path | None = option(
        "Folder with folders of models, which runs may read.",
        panel=LIMITS,
        metavar="DIR",
        default_text="none",
        default=None,
    )
    runs: int = option("Runs at a time.", panel=LIMITS, metavar="N", rule=between(1, 64), default=1)
    device: Literal["auto", "cpu", "cuda"] = option(
        "Device that runs compute on.", panel=RUN, default_text="auto: cuda if there is one", default="auto"
    )
    once: bool = option("Exit after one run, with its exit code.", panel=RUN, default=False)
    patience_s: float = option(
        "Longest time in seconds that a run may wait for a lost connection, whatever {patience} the client has.",
        panel=LIMITS,
        name="patience",
        metavar="S",
        default_text="3600",
        rule=between(2, 1_000_000),
        default=3600.0,
    )


@takes(ServeOptions, panels=PANELS)
def serve(
    ticket: Annotated[
        str | None, typer.Argument(metavar="TICKET", help="Ticket of a client: connect to it, and listen nowhere.")
    ] = None,
    **given: Any,
) -> None:
    """Hold layers for clients elsewhere, over encrypted links.

    Settings, model configuration and weights come from the client, which keeps
    data, labels, checkpoints, and the first and last layers. Code of a client
    is never run. Listen, and give the printed ticket to a client's --servers:

    thinpipe serve --listen 0.0.0.0:7000

    Or connect to a client that has printed a ticket with its --listen:

    thinpipe serve TICKET
    """
    from thinpipe.comm.secure.identity import fingerprint_bytes, own_identity
    from thinpipe.comm.secure.peers import KnownPeers
    from thinpipe.comm.secure.ticket import Admission, Ticket
    from thinpipe.train.serve.lobby import open_listener, parse_address, ticket_address

    with one_line_errors():
        options = ServeOptions(**read(ServeOptions, given))
        if ticket is None and options.listen is None:
            raise OptionError(
                "a server listens, with {listen} 0.0.0.0:7000, or connects to a client: thinpipe serve TICKET"
            )
        if ticket is not None and options.allow:
            raise OptionError("a ticket names the one client that this server connects to: leave out {allow}")
        if options.address is not None and options.listen is None:
            raise OptionError("{address} is where others reach {listen}: give that too, or leave it out")
        invitation = None if ticket is None else Ticket.parse(ticket)
        identity = own_identity()
        allowed = [fingerprint_bytes(each) for each in options.allow] or None
        listener, where = None, None
        if options.listen is not None:
            host, port = parse_address(options.listen, "listen")
            listener = open_listener(host, port)
            where = ticket_address(host, listener.getsockname()[1], options.address)
        owner = owner_of(options, where)
    server = _Server(options, owner, identity, Admission(KnownPeers(), allowed), invitation)
    raise typer.Exit(server.run(listener, where))


def owner_of(options: ServeOptions, where: tuple[str, int] | None) -> Any:
    """Return what the owner allows, with the facts for clients; raise ValueError for a folder that cannot be used."""
    import torch

    from thinpipe.comm.addresses import address_and_port
    from thinpipe.system.sizes import free_bytes
    from thinpipe.train.serve.desk import ServerFacts
    from thinpipe.train.serve.served_run import Owner
    from thinpipe.train.versions import versions

    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise OptionError("{device} cuda needs a GPU that torch can use, and there is none; take {device} cpu")
    cache = options.cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "thinpipe"
    try:
        (cache / "runs").mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OptionError(f"{{cache}} {cache} cannot be used: {error.strerror}; name another folder") from None
    facts = ServerFacts(
        name=options.name or socket.gethostname(),
        device="cuda" if has_gpu and options.device != "cpu" else "cpu",
        memory=options.memory or free_bytes(),
        address=None if where is None else address_and_port(*where),
        **versions(),
    )
    return Owner(
        facts=facts,
        memory=options.memory,
        threads=options.threads,
        cache=cache.absolute(),
        disk=options.disk,
        models=(*([] if options.models is None else [options.models.absolute()]), *hub_folders()),
        runs=options.runs,
        patience_s=options.patience_s,
    )


def hub_folders() -> list[Path]:
    """Return the folders of models in the hub's cache of this user."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return sorted(Path(HF_HUB_CACHE).glob("models--*/snapshots"))


class _Server:
    """One `thinpipe serve`: its supervisor, in threads, and the main thread, which waits for signals."""

    def __init__(self, options: ServeOptions, owner: Any, identity: Any, admission: Any, ticket: Any) -> None:
        from thinpipe.train.serve.supervisor import Supervisor

        self._options, self._identity, self._admission, self._ticket = options, identity, admission, ticket
        self._results: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._supervisor = Supervisor(owner, identity, None if ticket else admission, self._log, self._results.put)

    def run(self, listener: socket.socket | None, where: tuple[str, int] | None) -> int:
        """Serve until a signal, or the end of the first run with ``once``; return the exit code."""
        from thinpipe.comm.secure.gate import Gate
        from thinpipe.comm.secure.ticket import Ticket
        from thinpipe.comm.signals import RaisedSignal, handled_signals
        from thinpipe.launch.forking import import_ahead
        from thinpipe.train.serve.lobby import JOIN_S, TICKET_S

        import_ahead("thinpipe.train.serve.server_worker", "thinpipe.codecs.kernels.cpu", "transformers")
        with handled_signals(RaisedSignal(), lambda handler: handler is not signal.SIG_IGN) as signals:
            try:
                if listener is not None:
                    gate = Gate(listener, self._supervisor.handle, self._log)
                    gate.start()
                if self._ticket is not None:
                    patience_s = JOIN_S if self._options.once else None
                    arguments = (self._ticket, patience_s)
                    threading.Thread(target=self._dial, args=arguments, name="thinpipe-dial", daemon=True).start()
                elif where is not None:
                    secret = self._admission.new_secret(self._options.runs, TICKET_S)
                    typer.echo(f"ticket: {Ticket(*where, self._identity.fingerprint, secret)}")
                    self._log(f"listening at port {where[1]} for clients with this ticket")
                return self._wait()
            except Interrupted as error:
                number = error.number
                self._stop(number, signals)
        typer.echo(f"thinpipe: {ended_by(number)}", err=True)
        return 128 + number

    def _wait(self) -> int:
        """Return the exit code after one run, with ``once``, or when the client rejects this server."""
        while True:
            result = self._results.get()
            if isinstance(result, BaseException):
                typer.echo(f"thinpipe: {result}", err=True)
                return 2
            if self._options.once:
                return result

    def _dial(self, ticket: Any, patience_s: float | None) -> None:
        try:
            self._supervisor.dial(ticket, patience_s)
        except Exception as error:
            self._results.put(error)

    def _stop(self, number: int, signals: Any) -> None:
        """Forward a signal to the workers, and wait until the runs have stopped; a second signal kills them."""
        self._supervisor.stop(number)
        while self._supervisor.is_busy:
            if signals.repeated:
                self._supervisor.stop(signal.SIGKILL)
            time.sleep(0.05)

    def _log(self, line: str) -> None:
        """Print a line with the time, and append it to the log of this machine."""
        from thinpipe.comm.membership import print_line
        from thinpipe.train.serve.log import append_log

        print_line(line)
        append_log(line)
