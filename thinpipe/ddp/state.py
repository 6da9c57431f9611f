"""What the hook remembers: the codec, for every parameter what was not sent yet, and how many bytes travelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinpipe.codecs.base import Codec
from thinpipe.codecs.recipes import directions
from thinpipe.codecs.rounding import rounding_key
from thinpipe.codecs.spec import codec


def ddp_state(
    spec: str | Codec,
    *,
    process_group: dist.ProcessGroup | None = None,
    error_feedback: bool = True,
    seed: int = 0,
) -> DDPState:
    """What ``register_comm_hook`` wants beside ``ddp_hook``; one for each model.

    ``process_group`` is the one the model was given, if it was given one. With ``error_feedback`` what a codec lost
    of a gradient is added to the next one, so that nothing is lost for good, only late. ``seed`` is for codecs that
    round at random (``+sr``): every replica, gradient and step has numbers of its own.
    """
    spec = directions(spec)[1] if isinstance(spec, str) else spec
    return DDPState(codec(spec), process_group, error_feedback, seed)


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


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return (model.module if isinstance(model, DistributedDataParallel) else model).named_parameters()


def _owned(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device of its parameter: the hook writes into what it remembers."""
    return tensor.to(device, copy=True)
