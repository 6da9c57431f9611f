"""What stages keep of chunks between their forward and their backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from thinpipe.pipeline.batchnorm import frozen_statistics
from thinpipe.pipeline.order import Action


def kept_bytes(module: nn.Module, inputs: Sequence[Tensor], beside: Mapping[str, Tensor], *, recompute: bool) -> int:
    """Run a chunk through a stage as in training, which changes nothing, and count what stays.

    With ``recompute`` what is between inputs and outputs does not.
    """
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with frozen_statistics(module), torch.random.fork_rng(), saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(*inputs, **beside)
    outputs = output if isinstance(output, tuple) else (output,)
    stays = [*inputs, *outputs, *([] if recompute else saved)]
    own = {tensor.untyped_storage().data_ptr() for tensor in module.state_dict(keep_vars=True).values()}
    # By memory: a tensor is often saved several times, and as several views.
    sizes = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in stays)}
    return sum(size for place, size in sizes.items() if place not in own)


def most_kept(orders: Mapping[int, Sequence[Action]], chunk_bytes: Mapping[int, int]) -> int:
    """The most that any worker keeps at once, where ``chunk_bytes`` are those of a chunk for every stage."""
    most = 0
    for actions in orders.values():
        held = Counter[int]()
        for action in actions:
            held[action.stage] += 1 if action.kind == "F" else -1
            most = max(most, sum(count * chunk_bytes[stage] for stage, count in held.items()))
    return most
