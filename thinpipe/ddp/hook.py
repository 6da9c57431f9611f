"""The communication hook: every bucket of gradients becomes one compressed message to all replicas.

    model.register_comm_hook(thinpipe.ddp_state("uniform:8"), thinpipe.ddp_hook)

    buffer of a bucket   | weight       | bias | weight           |     1  each gradient is corrected by what its
                               |           |         |                     last message lost
    message              | codes    |b| codes         |                 2  encoded by itself: layers differ in scale,
                                                                           and low-rank codecs need its matrix
    from all replicas    | codes    |b| codes         |  replica 0      3  gathered
                         | codes    |b| codes         |  replica 1
                               |           |         |                  4  decoded; the new loss is remembered
    buffer of a bucket   | mean         | mean | mean             |     5  averaged

Every replica decodes the same messages and adds them in the same order, so all have the same result to the last bit.
"""

# No `from __future__ import annotations` here: DDP reads the hook's annotations and wants types, not their names.

import atexit
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.codecs.base import Codec
from thinpipe.codecs.spec import codec
from thinpipe.ddp.state import DDPState, Memory

SMALL = 256  # a gradient with fewer values travels as it is: compressing it costs more time than it saves
LETTING_GO_S = 10.0  # the longest that a program waits at its end for threads of gloo
ALIGNMENT = 16  # bytes: where a part of a message starts, so that kernels and views find their numbers aligned

_AS_IT_IS = codec("none")
_groups: list[dist.ProcessGroup | None] = []  # one at most


@dataclass(frozen=True)
class _Part:
    """One gradient of a bucket and its place in the message."""

    codec: Codec
    gradient: Tensor  # a view into the bucket's buffer, as a matrix where the parameter has rows
    corrected: Tensor  # what is sent: the gradient itself, or wider where it is of half precision
    memory: Memory | None  # None: nothing can be lost, or nothing is to be made up for
    key: int  # of stochastic rounding
    start: int
    stop: int


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket's gradients over all replicas, as DDP's own hook does, through the codec of ``state``."""
    buffer = bucket.buffer()
    parts = list(_parts(state, bucket))
    size = -(-parts[-1].stop // ALIGNMENT) * ALIGNMENT
    wire = torch.zeros(size, dtype=torch.uint8, device=buffer.device)
    for part in parts:
        kept = None if part.memory is None else part.memory.codec
        part.codec.encode(part.corrected, wire[part.start : part.stop], state=kept, key=part.key)
    state.gradient_bytes += buffer.numel() * buffer.element_size()
    state.wire_bytes += size
    state.steps += bucket.is_last()

    _keep_until_the_end(state.process_group or dist.group.WORLD)
    messages = list(wire.new_empty(state.replicas * size).split(size))
    work = dist.all_gather(messages, wire, group=state.process_group, async_op=True)
    assert work is not None  # which it is on those that are not in the group, and DDP calls hooks on those that are

    def finish(gathered: torch.futures.Future[list[Tensor]]) -> Tensor:
        gathered.wait()  # raises if it failed: a replica is gone, and these messages are nobody's
        for part in parts:
            _average(part, messages, state.rank)
        return buffer

    return work.get_future().then(finish)


def _keep_until_the_end(group: dist.ProcessGroup | None) -> None:
    """Hold on to the group of the last exchange.

    ``destroy_process_group`` leaves a group to the DDP module, which ends gloo's threads when it goes: with Python's
    lock in its hands, so that it waits for ever for a thread that needs the lock to let go of ``finish``.
    """
    if not _groups:
        atexit.register(_let_go)
    _groups[:] = [group]


def _let_go() -> None:
    """Wait until gloo's threads have let go of the tensors of the last exchange, then of its group.

    These are Python's as well, and a thread that needs Python's lock when Python has ended aborts the program.
    """
    deadline = time.monotonic() + LETTING_GO_S
    is_busy = True
    while is_busy and time.monotonic() < deadline:
        time.sleep(0.005)  # and leave Python's lock to them
        is_busy = any(state != "S" for state in _gloo_states())  # S: asleep, so waiting for work
    _groups.clear()


def _gloo_states() -> Iterator[str]:
    """What Linux says of each thread that carries out gloo's collectives."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            name, _, rest = thread.read_text().partition("(")[2].rpartition(")")
            if name == "pt_gloo_runloop":
                yield rest.split()[0]


def _parts(state: DDPState, bucket: dist.GradBucket) -> Iterator[_Part]:
    buffer, first, start = bucket.buffer(), 0, 0
    for parameter in bucket.parameters():
        flat = buffer[first : first + parameter.numel()]
        # The buffer's order of values, whatever the parameter's strides: a matrix either way, on every replica alike.
        gradient = flat.view(parameter.shape[0], -1) if parameter.dim() > 1 else flat
        chosen = _choose(state.codec, gradient)
        memory, corrected = None, gradient
        if state.error_feedback and chosen != _AS_IT_IS:
            memory = state.memory(parameter)
            # Half precision would round away most of what is to be made up for.
            corrected = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if memory.error is not None:
                corrected.view(-1).add_(memory.error)
        stop = start + chosen.wire_bytes(corrected.shape, corrected.dtype)
        yield _Part(chosen, gradient, corrected, memory, state.rounding_key(parameter), start, stop)
        first, start = first + parameter.numel(), math.ceil(stop / ALIGNMENT) * ALIGNMENT


def _choose(wanted: Codec, gradient: Tensor) -> Codec:
    """The codec, unless it would not shrink this gradient."""
    size = gradient.numel() * gradient.element_size()
    shrinks = gradient.numel() >= SMALL and wanted.wire_bytes(gradient.shape, gradient.dtype) < size
    return wanted if shrinks else _AS_IT_IS


def _average(part: _Part, messages: list[Tensor], own: int) -> None:
    """Steps 4 and 5 for one gradient."""
    if part.corrected.is_cuda:
        # This runs on a stream of its own; without a note the memory could be given away before it is done.
        part.corrected.record_stream(torch.cuda.current_stream())
    wide = torch.promote_types(part.gradient.dtype, torch.float32)

    def decode(rank: int, out: Tensor) -> Tensor:
        return part.codec.decode(messages[rank][part.start : part.stop], out)

    # New memory costs more than a pass over old: what can be is decoded into the bucket itself. What was sent still
    # lies there, so what was lost of it comes first.
    scratch = torch.empty_like(part.gradient, dtype=wide)
    if part.memory is not None:
        lost = torch.sub(part.corrected, decode(own, scratch)).view(-1)
        # A gradient that overflowed is seen by all and its step skipped; it must not spoil the steps after it.
        part.memory.error = lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    total = part.gradient if part.gradient.dtype == wide else torch.empty_like(scratch)
    decode(0, total)
    for rank in range(1, len(messages)):
        total += decode(rank, scratch)
    part.gradient.copy_(total.div_(len(messages)))
