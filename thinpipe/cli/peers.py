"""thinpipe peers: the machines that may connect to this one, and this machine's own key."""

from __future__ import annotations

from typing import Annotated

import typer

from thinpipe.cli.terminal import one_line_errors
from thinpipe.comm.secure.identity import fingerprint_text, own_identity
from thinpipe.comm.secure.peers import KnownPeer, KnownPeers
from thinpipe.lab.records import report
from thinpipe.lab.records.record import Column

_COLUMNS = (
    Column(name="fingerprint", heading="fingerprint", key=True),
    Column(name="name", heading="name", key=True),
    Column(name="since", heading="since", key=True),
    Column(name="seen", heading="last seen", key=True),
)


def peers(
    remove: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FINGERPRINT",
            help="Remove this machine: it needs a new ticket then. The beginning of a fingerprint is enough.",
        ),
    ] = None,
) -> None:
    """List the machines that may connect to this one.

    A machine that connects with a ticket is remembered by its key, and needs none
    later. The first line is the fingerprint of this machine's own key, which is
    made on first use, in ~/.config/thinpipe or the folder in THINPIPE_HOME.

    Example: thinpipe peers --remove gpu-box
    """
    with one_line_errors():
        known = KnownPeers()
        if remove is not None:
            fingerprint, peer = _find(known, remove)
            known.forget(fingerprint)
            typer.echo(f"removed {peer.name} ({fingerprint_text(fingerprint)})")
            return
        own, found = fingerprint_text(own_identity().fingerprint), known.read()
    rows = [
        {"fingerprint": fingerprint_text(each), "name": peer.name, "since": peer.since[:10], "seen": peer.seen[:10]}
        for each, peer in found.items()
    ]
    typer.echo(f"this machine: {own}\n")
    if rows:
        report.show([report.Table(title="Known machines", columns=_COLUMNS, rows=rows)])
    else:
        typer.echo("no known machines: one is remembered when it connects with a ticket")


def _find(known: KnownPeers, wanted: str) -> tuple[bytes, KnownPeer]:
    """Return the one peer with this name or fingerprint; raise ValueError if there is none, or more than one."""
    peers = {fingerprint_text(fingerprint): (fingerprint, peer) for fingerprint, peer in known.read().items()}
    if wanted in peers:
        return peers[wanted]  # peers choose their names: one must not hide behind another's fingerprint
    fitting = [text for text, (_, peer) in peers.items() if wanted and (peer.name == wanted or text.startswith(wanted))]
    if not fitting:
        raise ValueError(
            f"--remove takes the name or the fingerprint of a known machine; got {wanted!r}: `thinpipe peers` lists all"
        )
    if len(fitting) > 1:
        raise ValueError(f"--remove {wanted} fits {len(fitting)} machines, {' and '.join(fitting)}: give a fingerprint")
    return peers[fitting[0]]
