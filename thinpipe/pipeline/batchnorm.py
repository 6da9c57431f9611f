"""Batch norm with microbatches: running statistics of the full mini-batch, unaffected by recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

_FROZEN: WeakSet[BatchNorm] = WeakSet()


@dataclass
class _Sums:
    """The sums over the chunks of a step, per channel."""

    values: Tensor
    squares: Tensor
    count: int


class DeferredStatistics:
    """Hooks that make the batch norms of a module update their running statistics once per step, from all its chunks.

    Each chunk is still normalized by its own statistics. Plain batch norm updates the running statistics for every
    chunk: with 16 chunks and momentum 0.1 the last seven weigh more than the rest together, and each variance is that
    of a sixteenth of the batch. Works through hooks, so parameters, buffers and their names do not change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._sums: dict[BatchNorm, _Sums] = {}
        self._held: set[BatchNorm] = set()
        for norm in tracking_norms(module):
            norm.register_forward_pre_hook(self._before)
            norm.register_forward_hook(self._after, always_call=True)

    def commit(self) -> None:
        """Update the running statistics once at the end of a step, as plain batch norm does for a full batch."""
        for norm, sums in self._sums.items():
            mean = sums.values / sums.count
            variance = sums.squares / sums.count - mean.square()
            variance *= sums.count / max(sums.count - 1, 1)  # running statistics use the unbiased variance
            tracked = cast(Tensor, norm.num_batches_tracked)
            tracked += 1
            momentum = 1.0 / float(tracked) if norm.momentum is None else norm.momentum
            for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
                cast(Tensor, running).lerp_(new.to(cast(Tensor, running)), momentum)
        self._sums.clear()

    def _before(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        norm = cast(BatchNorm, module)
        if not norm.training or not norm.track_running_stats:
            return
        norm.track_running_stats = False  # for this one call
        self._held.add(norm)
        if norm in _FROZEN or type(inputs[0]) is not Tensor:  # the second: a placeholder without values
            return
        with torch.no_grad():
            # Doubles: the variance is a small difference of large sums.
            values = inputs[0].detach().transpose(0, 1).reshape(norm.num_features, -1).double()
            sums = self._sums.setdefault(norm, _Sums(values.new_zeros(()), values.new_zeros(()), 0))
            sums.values = sums.values + values.sum(1)
            sums.squares = sums.squares + values.square().sum(1)
            sums.count += values.shape[1]

    def _after(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | None) -> None:
        norm = cast(BatchNorm, module)
        if norm in self._held:
            self._held.remove(norm)
            norm.track_running_stats = True


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Run batch norms in training mode without changing their statistics: for recomputation and dummy inputs.

    They update copies, which are discarded: recomputation must save as many tensors as the first run.
    """
    kept = [(norm, dict(norm.named_buffers())) for norm in tracking_norms(module)]
    for norm, buffers in kept:
        _FROZEN.add(norm)
        for name, buffer in buffers.items():
            setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, buffers in kept:
            _FROZEN.remove(norm)
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)


def tracking_norms(module: nn.Module) -> list[BatchNorm]:
    """Return the batch norms of a module that have running statistics."""
    return [child for child in module.modules() if isinstance(child, BATCH_NORMS) and child.track_running_stats]
