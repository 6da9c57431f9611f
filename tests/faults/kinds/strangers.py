"""Strangers: somebody who is no worker connects to the ports of a run, and sends junk, half a message, or nothing."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from tests.faults.expected import Expected
from tests.faults.fault import Fault, Impossible, Missed
from tests.faults.moments import AT_ONCE, draw_moment
from tests.faults.runs import Run, Setting

_CONNECTIONS = 50
_LIMIT_S = 120  # for the client to listen, importing torch on a busy machine
_SET = b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + struct.pack("<Q", 1) + b"k"  # torch's store: hello, SET of "k"
_ATTACKS = {
    "sends nothing": b"",
    "sends half a message": _SET + struct.pack("<Q", 100) + b"abc",
    "claims a message of 8 GiB": _SET + struct.pack("<Q", 8 << 30) + bytes(1 << 16),
    "sends junk": random.Random(0).randbytes(1 << 16),
}


def draw_stranger(random: random.Random, setting: Setting) -> Fault:
    """On one port before the others join, or on all ports of a run under way."""
    if not Path("/proc/net/tcp").exists():
        raise Impossible("ports of processes are found in /proc/net/tcp")
    what = random.choice(list(_ATTACKS))
    early = random.random() < 0.5
    moment = AT_ONCE if early else draw_moment(random, phases=("step", "save", "evaluation"))
    kept: list[socket.socket] = []  # open until the run is over

    def start(run: Run) -> None:
        options = ("--save", str(run.saved), "--save-every", "1")
        run.start_machine(0, *options)
        if early:
            until = time.monotonic() + _LIMIT_S
            while run.port not in listening(run) and time.monotonic() < until and not run.is_over:
                time.sleep(0.05)
            kept.extend(_attack(run.port, _ATTACKS[what]))
        for rank in range(1, setting.workers):
            run.start_machine(rank, *options)

    def strike(run: Run) -> None:
        if early:
            return
        ports = listening(run)
        if not ports:
            raise Missed
        for port in ports:
            kept.extend(_attack(port, _ATTACKS[what]))

    def undo(run: Run) -> None:
        for connection in kept:
            connection.close()

    return Fault(
        words=f"a stranger {what}, {'before the servers come' if early else moment}",
        strike=strike,
        moment=moment,
        expected=Expected("must"),
        start=start,
        how="machines",
        undo=undo,
    )


def _attack(port: int, message: bytes) -> list[socket.socket]:
    connections = []
    with suppress(OSError):  # it may refuse, or close what it does not like
        for _ in range(_CONNECTIONS):
            connection = socket.create_connection(("127.0.0.1", port), 5)
            connections.append(connection)
            connection.sendall(message)
    return connections


def listening(run: Run) -> list[int]:
    """The ports at which the processes of a run listen."""
    inodes = set()
    for process in (each for machine in run.machines for each in machine.processes()):
        with suppress(OSError):  # it has ended
            inodes |= {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
