"""Slots and routes: shapes and dtypes of the tensors sent, the stages of a link, message tags and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# A tag encodes direction, sending stage, chunk and slot. Bit 30 avoids the small tags that users choose.
_MAX_STAGES, _MAX_CHUNKS, _MAX_SLOTS = 1 << 10, 1 << 14, 1 << 5


@dataclass(frozen=True)
class Slot:
    """The shape and dtype of one of the tensors that are sent for each chunk."""

    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(like: Any) -> Slot:
        """Return the slot of a tensor, or of another object with a shape and a dtype."""
        return Slot(torch.Size(like.shape), like.dtype)

    @property
    def tensor_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Handover = dict[int, torch.Tensor]  # wires by their tags, from one end of a link to the other within a process


@dataclass
class Route:
    """The stages, device and process group of a link, seen from one of its ends."""

    source: int  # stages
    target: int
    sends: bool  # True at the sending end
    device: torch.device  # of the stage at this end
    group: Any
    peer: int = -1  # the worker at the other end: its rank in the group; the schedule decides where stages live
    handover: Handover | None = None  # the other end is in this process

    @property
    def direction(self) -> str:
        return "forward" if self.target > self.source else "backward"

    @property
    def stage(self) -> int:
        """The stage at this end."""
        return self.source if self.sends else self.target

    @property
    def other_stage(self) -> int:
        return self.target if self.sends else self.source

    def tag(self, chunk: int, slot: int) -> int:
        backward = int(self.direction == "backward")
        return 1 << 30 | ((backward * _MAX_STAGES + self.source) * _MAX_CHUNKS + chunk) * _MAX_SLOTS + slot

    def check_limits(self, chunks: int, slots: int) -> None:
        """Raise ValueError if not every message can have a unique tag."""
        for what, count, limit in (
            ("stages", max(self.source, self.target) + 1, _MAX_STAGES),
            ("chunks", chunks, _MAX_CHUNKS),
            ("tensors between two stages", slots, _MAX_SLOTS),
        ):
            if count > limit:
                raise ValueError(f"a pipeline has at most {limit} {what}, got {count}")

    def __str__(self) -> str:
        return f"{self.direction} link from stage {self.source} to stage {self.target}"
