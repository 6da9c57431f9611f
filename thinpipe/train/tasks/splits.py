"""Splits of data sets: samples by number, as batches; images are read per batch, texts are stored as tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinpipe.train.tasks.task import Batch, Described, Split

Augment = Callable[[Tensor, torch.Generator], Tensor]
Prepare = Callable[[Tensor], Tensor]

VALIDATION_PART = 5  # every fifth sample validates if a data set has no validation split


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images, augmented as they are read, so that small ones are cheap to crop, then prepared for the model."""

    read: Callable[[Tensor], Tensor]  # sample numbers -> [N, C, h, w], bytes or floats from 0 to 1
    labels: Tensor
    prepare: Prepare  # [N, C, h, w] -> [N, 3, H, W], normalised floats
    augment: Augment
    names: Callable[[Tensor], Sequence[str]] | None = None  # sample numbers -> file names and sizes

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        images = self.read(indices)
        if augment_seed is not None:
            images = self.augment(images, torch.Generator().manual_seed(augment_seed))
        return Batch(inputs=(self.prepare(images),), labels=self.labels[indices])

    def describe(self, indices: Tensor) -> dict[str, bytes]:
        files = {} if self.names is None else {"files": "\n".join(self.names(indices)).encode(errors="surrogateescape")}
        return {"labels": self.labels[indices].numpy().tobytes(), **files}


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts as token ids and masks, without random augmentation: the augment seed has no effect."""

    ids: Tensor  # [M, T]
    mask: Tensor
    labels: Tensor
    types: Tensor | None = None  # the text of a pair that a token belongs to; None: the model takes no types
    repeats: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        return Batch(inputs=tuple(each[indices] for each in self._tokens()), labels=self.labels[indices])

    def describe(self, indices: Tensor) -> dict[str, bytes]:
        tokens = b"".join(each[indices].numpy().tobytes() for each in self._tokens())
        return {"labels": self.labels[indices].numpy().tobytes(), "texts": tokens}

    def _tokens(self) -> tuple[Tensor, ...]:
        return (self.ids, self.mask) if self.types is None else (self.ids, self.mask, self.types)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A subset of the samples of a split, renumbered."""

    whole: Split
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def repeats(self) -> bool:
        return getattr(self.whole, "repeats", False)

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        return self.whole.batch(self.indices[indices], augment_seed=augment_seed)

    def describe(self, indices: Tensor) -> dict[str, bytes]:
        return self.whole.describe(self.indices[indices]) if isinstance(self.whole, Described) else {}


def at_most(split: Split, samples: int | None) -> Split:
    """Return the split, or ``samples`` of it, drawn with a fixed seed, since files are often sorted by class.

    For a ``Part`` the result is a part of the same underlying split, which is thus always ``Part.whole``.
    """
    if samples is None or samples >= len(split):
        return split
    if samples < 1:
        raise ValueError(f"a number of samples is at least 1, got {samples}")
    drawn = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:samples].sort().values
    if isinstance(split, Part):
        return Part(whole=split.whole, indices=split.indices[drawn])
    return Part(whole=split, indices=drawn)


def split_fifth(count: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of training samples, and of every fifth sample, which validates; independent of the seed."""
    validates = torch.arange(count) % VALIDATION_PART == 0
    return (~validates).nonzero().squeeze(1), validates.nonzero().squeeze(1)
