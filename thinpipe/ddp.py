"""Compressed gradients for DistributedDataParallel: a communication hook, and what it remembers between steps.

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

# Annotations stay values, not text: torch compares those of a hook with its own types.
import atexit
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinpipe.codecs.base import Codec
from thinpipe.codecs.recipes import directions
from thinpipe.codecs.rounding import rounding_key
from thinpipe.codecs.spec import codec

SMALL = 256  # a gradient with fewer values travels as it is: compressing it costs more time than it saves
LETTING_GO_S = 10.0  # the longest that a program waits at its end for threads of gloo
ALIGNMENT = 16  # bytes: where a part of a message starts, so that kernels and views find their numbers aligned

_AS_IT_IS = codec("none")
_groups: list[dist.ProcessGroup | None] = []  # one at most


@dataclass
class Memory:
    """What is kept for one parameter from step to step; it belongs to this replica and differs on every other."""

    error: Tensor | None = None  # what the last message lost, to be added to the next gradient
    codec: dict[str, Tensor] = field(default_factory=dict)  # what the codec starts from next time


class DDPState:
    """The settings, memory and counters of one model's hook on one replica."""

    def __init__(self, codec: Codec, process_group: dist.ProcessGroup | None, error_feedback: bool, seed: int) -> None:
        self.codec = codec
        self.process_group = process_group
        self.error_feedback = error_feedback
        self.seed = seed
        self.steps = 0
        self.steps_before = 0  # those of the run before the first one here
        self.gradient_bytes = 0  # of all gradients this replica had to pass on, uncompressed
        self.wire_bytes = 0  # of the messages it made of them; every other replica received each once
        # By identity, with the parameter, which so keeps its identity: DDP regroups its buckets after the first step,
        # so that no place in a bucket stays a parameter's own.
        self._memories: dict[int, tuple[Tensor, Memory]] = {}
        self._numbers: dict[int, int] = {}  # likewise by identity

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def replicas(self) -> int:
        return dist.get_world_size(self.process_group)

    def rounding_key(self, parameter: Tensor) -> int:
        """Of this step's gradient of a parameter. Parameters count in the order in which the first step brings them.

        That is DDP's first grouping, so it is the same when a run is taken up again.
        """
        number = self._numbers.setdefault(id(parameter), len(self._numbers))
        return rounding_key(self.seed, self.rank, number, self.steps_before + self.steps)

    def memory(self, parameter: Tensor) -> Memory:
        return self._memories.setdefault(id(parameter), (parameter, Memory()))[1]

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """What to save beside ``model.state_dict()``: on every replica, for each has lost something else.

        ``model`` is the wrapped one or the one inside; it gives the parameters their names.
        """
        return {
            "spec": self.codec.spec,
            "rank": self.rank,
            "replicas": self.replicas,
            "steps": self.steps_before + self.steps,
            "parameters": {
                name: {"error": memory.error, "codec": dict(memory.codec)}
                for name, parameter in _named(model)
                if (memory := self._memories.get(id(parameter), (parameter, None))[1]) is not None
            },
        }

    def load_state_dict(self, saved: dict[str, Any], model: nn.Module) -> None:
        """Go on from what ``state_dict`` returned on this replica of a run with as many."""
        for name, here in (("spec", self.codec.spec), ("rank", self.rank), ("replicas", self.replicas)):
            if saved[name] != here:
                raise ValueError(
                    f"what a hook remembers goes back to the same codec on the same replica of as many; "
                    f"{name} was {saved[name]!r} and is {here!r}: load the file of this replica, "
                    f"or start without one, which loses the error of one step"
                )
        parameters = dict(_named(model))
        unknown = sorted(saved["parameters"].keys() - parameters.keys())
        if unknown:
            raise ValueError(
                f"what a hook remembers goes back to a model with the same parameters; this one has no {unknown[0]!r}"
            )
        self.steps_before = saved["steps"] - self.steps
        self._memories.clear()
        for name, kept in saved["parameters"].items():
            parameter = parameters[name]
            if kept["error"] is not None and kept["error"].numel() != parameter.numel():
                raise ValueError(
                    f"what a hook remembers goes back to a model with the same parameters; {name!r} had "
                    f"{kept['error'].numel()} values and has {parameter.numel()}"
                )
            memory = self.memory(parameter)
            memory.error = None if kept["error"] is None else _owned(kept["error"], parameter.device)
            memory.codec = {key: _owned(value, parameter.device) for key, value in kept["codec"].items()}


def ddp_state(
    spec: str | Codec,
    *,
    process_group: dist.ProcessGroup | None = None,
    error_feedback: bool = True,
    seed: int = 0,
) -> DDPState:
    """Return the state that ``register_comm_hook`` takes together with ``ddp_hook``; one for each model.

    ``process_group`` is the one the model was given, if it was given one. With ``error_feedback`` what a codec lost
    of a gradient is added to the next one, so that nothing is lost for good, only late. ``seed`` is for codecs that
    round at random (``+sr``): every replica, gradient and step has numbers of its own.
    """
    spec = directions(spec)[1] if isinstance(spec, str) else spec
    return DDPState(codec(spec), process_group, error_feedback, seed)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return (model.module if isinstance(model, DistributedDataParallel) else model).named_parameters()


def _owned(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device of its parameter: the hook writes into what it remembers."""
    return tensor.to(device, copy=True)


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
    mine = scratch = torch.empty_like(part.gradient, dtype=wide)
    if part.memory is not None:
        lost = torch.sub(part.corrected, decode(own, mine)).view(-1)
        # A gradient that overflowed is seen by all and its step skipped; it must not spoil the steps after it.
        part.memory.error = lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if own > 0 and len(messages) > 2:  # otherwise nothing is decoded while it is still needed
            scratch = torch.empty_like(mine)
    total = part.gradient if part.gradient.dtype == wide else torch.empty_like(mine)
    for rank in range(len(messages)):
        is_mine = rank == own and part.memory is not None
        value = mine if is_mine else decode(rank, scratch if rank else total)
        if rank:
            total += value
        elif is_mine:
            total.copy_(mine)
    part.gradient.copy_(total.div_(len(messages)))
