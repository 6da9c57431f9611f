"""Assignment of samples to batches: a pure function of seed, epoch and position, so that a run can be resumed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import Batch, Data, Split

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd, as in splitmix64: consecutive seeds end up far apart


def mixed_seed(*parts: int) -> int:
    """Return one seed below 2^63 mixed from several numbers; other numbers or another order give another seed."""
    seed = 0
    for part in parts:
        seed = ((seed ^ part) * _MIX + 1) % 2**64
        seed ^= seed >> 29
    return seed >> 1


def epoch_order(samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return the permutation of the samples in an epoch, counted from 0."""
    generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
    return torch.randperm(samples, generator=generator)


class SampleOrder:
    """The samples of each step; every worker can compute it, with or without the data."""

    def __init__(self, samples: int, *, step_samples: int, seed: int) -> None:
        self.samples, self.step_samples, self.seed = samples, step_samples, seed
        self._epoch, self._order = -1, torch.empty(0)

    def step(self, epoch: int, position: int) -> Tensor:
        """Return a step's samples of all replicas, batch after batch; epoch and position are counted from 0."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.samples, seed=self.seed, epoch=epoch)
        return self._order[position * self.step_samples : (position + 1) * self.step_samples]


class TrainingBatches:
    """The training batches of one worker: complete ones, or its share of each where there are several replicas.

    Stages have static shapes, so an epoch drops the samples that do not fill the batches of a step; the next epoch's
    order drops others.
    """

    def __init__(
        self, split: Split, *, batch_size: int, seed: int, share: tuple[int, int] = (0, 1), accumulate: int = 1
    ) -> None:
        self.split, self.seed, self.accumulate = split, seed, accumulate
        self.replica, self.replicas = share
        self._order = SampleOrder(len(split), step_samples=batch_size * accumulate, seed=seed)

    def step(self, epoch: int, position: int) -> list[Batch]:
        """Return the batches of a step, by its position in an epoch; augmentation is the same at every call."""
        samples = self._order.step(epoch, position).view(self.accumulate, self.replicas, -1)[:, self.replica]
        first = position * self.accumulate
        return [
            self.split.batch(each, augment_seed=mixed_seed(self.seed, epoch, number, self.replica))
            for number, each in enumerate(samples, first)
        ]


@dataclass(frozen=True)
class Samples:
    """A worker's view of the samples of a run: the order of all of them, and those that it reads."""

    order: SampleOrder
    training: TrainingBatches | None  # None unless this worker reads data
    validation: Split | None  # likewise

    @staticmethod
    def of(data: Data | None, count: int, settings: Settings, share: tuple[int, int]) -> Samples:
        order = SampleOrder(count, step_samples=settings.step_samples, seed=settings.seed)
        if data is None:
            return Samples(order, None, None)
        training = TrainingBatches(
            data.train,
            batch_size=settings.batch_size,
            seed=settings.seed,
            share=share,
            accumulate=settings.accumulate,
        )
        return Samples(order, training, data.validation)


def evaluation_samples(samples: int, start: int, batch_size: int) -> Tensor:
    """Return the numbers of a full batch from ``start`` on, padded with sample 0 at the end of the split."""
    indices = torch.arange(start, start + batch_size)
    indices[indices >= samples] = 0
    return indices
