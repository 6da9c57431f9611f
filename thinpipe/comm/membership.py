"""Membership of this process in a run: its rank, set by torchrun or ``become_member``, and joining the workers."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from thinpipe.comm.addresses import address_and_port, address_of, address_towards, interface_with
from thinpipe.comm.backend import is_preconnected
from thinpipe.comm.control import ACTIVITY, GRACE_S, Control
from thinpipe.comm.errors import LinkError, note_cause
from thinpipe.comm.group import link_errors
from thinpipe.comm.rendezvous import MasterStore, Patience, bounded, connect_control, make_store, own_address_towards
from thinpipe.options import OptionError
from thinpipe.system.sanitize import printable

if TYPE_CHECKING:  # needs the packages of the extra [train]
    from thinpipe.comm.secure.mesh import Mesh

COMPLETE = "the run is complete"  # for print_remote
PATIENCE_S = 60.0  # default time to wait for a silent worker

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SERVED = "THINPIPE_SERVED"
_AGAIN_S = 0.3  # to send the cause of an error, if the process takes part in another group


@dataclass(frozen=True)
class Member:
    """The rank of a worker, the world size, and its place on its machine."""

    rank: int
    size: int
    local_rank: int  # among the workers of its machine
    local_size: int
    machine: int = 0
    served: bool = False  # by `thinpipe serve`: servers have all settings, and every file, from the client


def member() -> Member | None:
    """Return the membership of this process; None if it is not a worker, and workers are still to be started."""
    if any(name not in os.environ for name in _REQUIRED):
        return None
    return Member(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        machine=int(os.environ.get("GROUP_RANK", "0")),
        served=_SERVED in os.environ,
    )


def is_served() -> bool:
    """Return True in a run whose servers have been started with `thinpipe serve`."""
    me = member()
    return me is not None and me.served


def become_member(rank: int, size: int, master: str) -> None:
    """Make this process one of the workers of a run on several machines, started by hand on each.

    ``master`` is HOST:PORT, where worker 0 listens and to which the others connect.
    """
    host, colon, port = master.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise OptionError(f"{{master}} is an address and a port of worker 0, as in 10.0.0.1:29400; got {master!r}")
    if not 0 <= rank < size:
        raise OptionError(
            f"{{rank}} is the number of this worker, from 0 to {size - 1} with {size} workers; got {rank}"
        )
    set_member(rank, size, machine=rank, local=(0, 1), master=(host.strip("[]"), port))


def set_member(rank: int, size: int, *, machine: int, local: tuple[int, int], master: tuple[str, str]) -> None:
    """Set the environment variables of torchrun. ``local``: local rank and number of workers on this machine."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "GROUP_RANK": str(machine),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
    }


def become_served(rank: int, size: int) -> None:
    """Make this process one of the workers of a run whose servers are those of `thinpipe serve`."""
    set_member(rank, size, machine=rank, local=(0, 1), master=("none", "0"))  # the mesh has the addresses
    os.environ[_SERVED] = "1"


def print_line(line: str) -> None:
    """Print a line on stderr; parts of it may come from peers."""
    print(f"thinpipe: {printable(line)}", file=sys.stderr, flush=True)


@contextmanager
def joined(
    backend: str | None = None,
    *,
    store_file: str | None = None,
    patience_s: float = PATIENCE_S,
    end: Callable[[str], Any],
) -> Iterator[Control]:
    """Join the process group that the environment describes, and yield the control channel.

    Args:
        backend: by default NCCL if every worker has its own GPU, else gloo.
        store_file: file store through which workers of one machine connect, instead of over a network.
        patience_s: seconds to wait for a missing or silent worker.
        end: terminates this process and reports the cause; called from a thread.
    """
    me = member()
    assert me is not None
    own_gpu = _take_devices(me)
    # Workers of one machine share a terminal: messages of one that waits for the client are enough.
    quiet = store_file is not None and me.rank > 1
    report: Callable[[str], None] = (lambda line: None) if quiet else print_line
    patience = Patience(patience_s, report)

    def join() -> tuple[MasterStore, dict[int, socket.socket]]:
        found = _find_store(me, store_file, patience)
        return found, connect_control(found.store, me.rank, me.size, own_address(), patience)

    master_store, connections = bounded(join, patience)
    control = Control(me.rank, connections, patience_s=patience_s, report=report, end=end)
    ACTIVITY.note("connecting to the other workers")
    # Torch then waits until all are connected: an idle worker would exit while others still connect to it.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    with _announced(control):
        _connect(backend, own_gpu, master_store.store, me)
        if is_preconnected():  # NCCL opens more connections to the store for new groups
            master_store.stop_listening()
        ACTIVITY.note("starting")
        master = address_and_port(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        print_remote(f"joined worker 0 at {master} as worker {me.rank} of {me.size}")
        yield control
    dist.destroy_process_group()
    control.close()


@contextmanager
def joined_mesh(
    mesh: Mesh, *, patience_s: float = PATIENCE_S, end: Callable[[str], Any], again: bool = False
) -> Iterator[Control]:
    """Join the process group of a mesh that has started, and yield the control channel, which travels inside the mesh.

    Nothing else is connected: no store, no socket of torch. Arguments as in ``joined``. ``again``: after an error this
    process can join the group of another mesh; ``end`` is not to end it, and the mesh is aborted.
    """
    from thinpipe.comm.secure.process_group import BACKEND, use

    me = member()
    assert me is not None
    _take_devices(me)

    def leave(cause: str) -> None:
        if not again:
            mesh.close(GRACE_S)  # sends the cause first
        end(cause)

    control = Control(me.rank, mesh.control_sockets(), patience_s=patience_s, report=print_line, end=leave)
    try:
        with _announced(control), link_errors("connecting"):
            use(mesh)
            os.environ["TORCH_DIST_INIT_BARRIER"] = "0"  # torch would wait in the store, which no other worker sees
            dist.init_process_group(BACKEND, store=dist.HashStore(), rank=me.rank, world_size=me.size)
            ACTIVITY.note("starting")
        with _announced(control):
            yield control
    except BaseException:
        mesh.close(_AGAIN_S if again else GRACE_S)
        if again:
            if dist.is_initialized():
                dist.destroy_process_group()
            control.close()
        raise
    dist.destroy_process_group()
    control.close()
    mesh.close()


def _take_devices(me: Member) -> bool:
    """Take this worker's share of GPUs and cores; return True if every worker of this machine has its own GPU."""
    own_gpu = torch.cuda.device_count() >= me.local_size
    if own_gpu:
        torch.cuda.set_device(me.local_rank)
    if "OMP_NUM_THREADS" not in os.environ:  # all workers on all cores are slower than each on its share
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // me.local_size))
    return own_gpu


@contextmanager
def _announced(control: Control) -> Iterator[None]:
    """Send the other workers the cause of an error inside."""
    try:
        yield
    except BaseException as error:
        # Keep the group: otherwise the others would see the lost connection before the cause.
        cause = control.first_cause(error)
        control.announce(cause)
        note_cause(error, cause)
        raise


def print_remote(line: str) -> None:
    """Print a line on the first worker of a machine without the client, which shows no progress or results."""
    me = member()
    # Launched by the client's command, whose terminal it shares; that of `thinpipe serve` is another machine's.
    launched = multiprocessing.parent_process() is not None and not is_served()
    if me is not None and me.machine > 0 and me.local_rank == 0 and not launched:
        print_line(line)


def _connect(backend: str | None, own_gpu: bool, store: dist.Store, me: Member) -> None:
    """Create the default process group with the backend that all workers choose."""
    try:
        with link_errors("connecting"):
            chosen = backend or ("nccl" if _all_have(own_gpu, store, me) else "gloo")
            dist.init_process_group(chosen, store=store, rank=me.rank, world_size=me.size)
    except (ValueError, MemoryError) as error:  # of gloo, which parses the contents of the store
        raise LinkError(f"the store has no addresses of workers, something else writes to its port ({error})") from None


def _find_store(me: Member, store_file: str | None, patience: Patience) -> MasterStore:
    if store_file is not None:
        return MasterStore(dist.FileStore(store_file, me.size))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo would resolve this machine's name, often to 127.0.0.1, which the others cannot reach.
        interface = interface_with(own_address_towards(host, patience))
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store, _, _ = next(
            dist.rendezvous("env://", me.rank, me.size, timeout=timedelta(seconds=max(patience.left(), 1)))
        )
        return MasterStore(store)
    return make_store(me.rank, me.size, host, port, patience)


def _all_have(own_gpu: bool, store: dist.Store, me: Member) -> bool:
    """Return True if every worker on every machine has its own GPU: all must choose the same backend."""
    store.set(f"own gpu {me.rank}", str(int(own_gpu)))
    return all(store.get(f"own gpu {rank}") == b"1" for rank in range(me.size))


def own_address() -> str:
    """Return the address where this worker listens: only on the interface that carries the tensors."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        return address_of(interface.split(",")[0])
    return address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
