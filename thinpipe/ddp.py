"""Compressed gradients for DistributedDataParallel: a communication hook, and its state between steps.

    model.register_comm_hook(thinpipe.ddp_state("uniform:8"), thinpipe.ddp_hook)

    buffer of a bucket   | weight       | bias | weight           |     1  each gradient is corrected by the
                               |           |         |                     error of its last message
    message              | codes    |b| codes         |                 2  encoded by itself: layers differ in scale,
                                                                           and low-rank codecs need its matrix
    from all replicas    | codes    |b| codes         |  replica 0      3  gathered
                         | codes    |b| codes         |  replica 1
                               |           |         |                  4  decoded; the new error is stored
    buffer of a bucket   | mean         | mean | mean             |     5  averaged

Every replica decodes the same messages and adds them in the same order, so results are bit-identical.
"""

# No postponed annotations: torch compares those of a hook with its own types.
import atexit
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinpipe.codecs.base import Codec
from thinpipe.codecs.recipes import directions
from thinpipe.codecs.rounding import rounding_key
from thinpipe.codecs.spec import codec

SMALL = 256  # a gradient with fewer values is sent uncompressed: compressing it costs more time than it saves
LETTING_GO_S = 10.0  # the longest wait at exit for threads of gloo
ALIGNMENT = 16  # bytes: of the start of each part of a message, for kernels and views

_AS_IT_IS = codec("none")
_groups: list[dist.ProcessGroup | None] = []  # one at most


@dataclass
class Memory:
    """The state of one parameter between steps; it differs between replicas."""

    error: Tensor | None = None  # error of the last message, added to the next gradient
    codec: dict[str, Tensor] = field(default_factory=dict)  # state of the codec


class DDPState:
    """The settings, memory and counters of one model's hook on one replica."""

    def __init__(self, codec: Codec, process_group: dist.ProcessGroup | None, error_feedback: bool, seed: int) -> None:
        self.codec = codec
        self.process_group = process_group
        self.error_feedback = error_feedback
        self.seed = seed
        self.steps = 0
        self.steps_before = 0  # steps of the run before it was resumed
        self.gradient_bytes = 0  # of all gradients of this replica, uncompressed
        self.wire_bytes = 0  # of their messages; every other replica received each one
        # By id(), with a reference to the parameter, so that the id stays valid. DDP regroups its buckets after the
        # first step, so a position in a bucket does not identify a parameter.
        self._memories: dict[int, tuple[Tensor, Memory]] = {}
        self._numbers: dict[int, int] = {}  # likewise by id()

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def replicas(self) -> int:
        return dist.get_world_size(self.process_group)

    def rounding_key(self, parameter: Tensor) -> int:
        """Return the rounding key of a parameter's gradient in this step.

        Parameters are numbered in the order of DDP's first buckets, so numbers are the same when a run is resumed.
        """
        number = self._numbers.setdefault(id(parameter), len(self._numbers))
        return rounding_key(self.seed, self.rank, number, self.steps_before + self.steps)

    def memory(self, parameter: Tensor) -> Memory:
        return self._memories.setdefault(id(parameter), (parameter, Memory()))[1]

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the state to save alongside ``model.state_dict()``, on every replica: errors differ between replicas.

        ``model``, which names the parameters, is the DDP module or the module inside.
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
        """Load the state that ``state_dict`` returned on this replica of a run with as many replicas."""
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

    ``process_group`` is the one the model was given, if it was given one. With ``error_feedback`` the
    compression error of a gradient is added to the next one, so it is delayed, not lost. ``seed`` is for stochastic
    rounding (``+sr``): every replica, gradient and step has different random numbers.
    """
    spec = directions(spec)[1] if isinstance(spec, str) else spec
    return DDPState(codec(spec), process_group, error_feedback, seed)


def torch_hook(
    name: Literal["fp16", "bf16", "powersgd"], process_group: dist.ProcessGroup | None, *, powersgd_start: int
) -> tuple[Any, Callable[..., Any]]:
    """Return the state and the hook of one of torch's own hooks, to compare with: arguments of ``register_comm_hook``.

    PowerSGD compresses from iteration ``powersgd_start`` + 1 on.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group, start_powerSGD_iter=powersgd_start)
        return state, powerSGD_hook.powerSGD_hook
    return process_group, getattr(default_hooks, f"{name}_compress_hook")


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return (model.module if isinstance(model, DistributedDataParallel) else model).named_parameters()


def _owned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device of its parameter: the hook writes into its state."""
    return tensor.to(device, copy=True)


@dataclass(frozen=True)
class _Part:
    """One gradient of a bucket and its place in the message."""

    codec: Codec
    gradient: Tensor  # a view into the bucket's buffer, as a matrix where the parameter has rows
    corrected: Tensor  # the tensor that is sent: the gradient, or a float32 copy of half precision
    memory: Memory | None  # None: lossless, or without error feedback
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
    assert work is not None  # it is None only outside the group, where DDP does not call hooks

    def finish(gathered: torch.futures.Future[list[Tensor]]) -> Tensor:
        gathered.wait()  # raises if it failed: a replica is gone, and the messages are invalid
        for part in parts:
            _average(part, messages, state.rank)
        return buffer

    return work.get_future().then(finish)


def _keep_until_the_end(group: dist.ProcessGroup | None) -> None:
    """Keep a reference to the group of the last exchange.

    After ``destroy_process_group`` only the DDP module refers to a group; its destructor joins gloo's threads while it
    holds the GIL, a deadlock if a thread needs the GIL to release ``finish``.
    """
    if not _groups:
        atexit.register(_let_go)
    _groups[:] = [group]


def _let_go() -> None:
    """Wait until gloo's threads have released the tensors of the last exchange, then release its group.

    These tensors are Python objects, and a thread that needs the GIL after Python has finalized aborts the program.
    """
    deadline = time.monotonic() + LETTING_GO_S
    is_busy = True
    while is_busy and time.monotonic() < deadline:
        time.sleep(0.005)  # and release the GIL
        is_busy = any(state != "S" for state in _gloo_states())  # S: asleep, so waiting for work
    _groups.clear()


def _gloo_states() -> Iterator[str]:
    """Yield the state in /proc of each thread that runs gloo's collectives."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            name, _, rest = thread.read_text().partition("(")[2].rpartition(")")
            if name == "pt_gloo_runloop":
                yield rest.split()[0]


def _parts(state: DDPState, bucket: dist.GradBucket) -> Iterator[_Part]:
    buffer, first, start = bucket.buffer(), 0, 0
    for parameter in bucket.parameters():
        flat = buffer[first : first + parameter.numel()]
        # In the buffer's order of values, whatever the parameter's strides: the same matrix on every replica.
        gradient = flat.view(parameter.shape[0], -1) if parameter.dim() > 1 else flat
        chosen = _choose(state.codec, gradient)
        memory, corrected = None, gradient
        if state.error_feedback and chosen != _AS_IT_IS:
            memory = state.memory(parameter)
            # Half precision would round away most of the error to be added.
            corrected = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if memory.error is not None:
                corrected.view(-1).add_(memory.error)
        stop = start + chosen.wire_bytes(corrected.shape, corrected.dtype)
        yield _Part(chosen, gradient, corrected, memory, state.rounding_key(parameter), start, stop)
        first, start = first + parameter.numel(), math.ceil(stop / ALIGNMENT) * ALIGNMENT


def _choose(wanted: Codec, gradient: Tensor) -> Codec:
    """Return the codec, or ``none`` if it would not shrink this gradient."""
    size = gradient.numel() * gradient.element_size()
    shrinks = gradient.numel() >= SMALL and wanted.wire_bytes(gradient.shape, gradient.dtype) < size
    return wanted if shrinks else _AS_IT_IS


def _average(part: _Part, messages: list[Tensor], own: int) -> None:
    """Decode and average one gradient, steps 4 and 5."""
    if part.corrected.is_cuda:
        # This runs on a separate stream; without this, the memory could be reused before it is done.
        part.corrected.record_stream(torch.cuda.current_stream())
    wide = torch.promote_types(part.gradient.dtype, torch.float32)

    def decode(rank: int, out: Tensor) -> Tensor:
        return part.codec.decode(messages[rank][part.start : part.stop], out)

    # Allocating memory costs more than a pass over it: decode into the bucket itself if possible. It still holds the
    # values that were sent, so compute their error first.
    mine = scratch = torch.empty_like(part.gradient, dtype=wide)
    if part.memory is not None:
        lost = torch.sub(part.corrected, decode(own, mine)).view(-1)
        # All replicas detect an overflowed gradient and skip its step; it must not corrupt later steps.
        part.memory.error = lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if own > 0 and len(messages) > 2:  # otherwise nothing else is decoded while ``mine`` is needed
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
