"""The copies that both ends of a link keep of every sample, against which ``delta(...)`` sends changes.

       sender                                        receiver

  (1)  change = x - copy
  (2)  encode                     ---- wire ---->
  (3)  value = copy + decode(wire)              (3)  value = copy + decode(wire), which the stage computes with
  (4)  copy = value as float16                  (4)  copy = value as float16

(3) and (4) are the same operations on the same bytes, so the copies stay the same without a word about them. What (1)
is taken against is what the receiver has, errors of earlier passes included: they do not add up. A copy in half
precision makes the next change a little larger and no message less exact, since the stage gets the value before (4).

A chunk with a sample that was never sent travels whole with the first codec, and (3) is its decoded value.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

COPY_DTYPE = torch.float16
_LARGEST = torch.finfo(COPY_DTYPE).max


class SampleCopies:
    """What one end of a link keeps: in memory, or in a file of ``directory`` that is mapped into it."""

    def __init__(self, samples: int, directory: Path | None = None) -> None:
        self.samples, self.directory = samples, directory
        self.known = torch.zeros(samples, dtype=torch.bool)  # which samples there are copies of
        self._copies: dict[int, Tensor] = {}  # by slot: all samples
        self._rows: Tensor | None = None  # of the step under way: the samples of each chunk
        self._known_chunks: list[bool] = []

    def reserve(self, slot: int, sample_shape: Sequence[int]) -> None:
        """Make room for the copies of one of the tensors that travel, unless there is."""
        shape = (self.samples, *sample_shape)
        found = self._copies.get(slot)
        if found is None:
            self._copies[slot] = self._allocate(torch.Size(shape))
        elif found.shape != shape:
            raise ValueError(
                f"copies of samples are kept for tensors of one shape: tensor {slot} has {list(sample_shape)} each, "
                f"its copies have {list(found.shape[1:])}; were they loaded from another model?"
            )

    def begin(self, samples: Tensor | None, chunks: int) -> None:
        """A step starts, with these samples; None: its samples have no copies, as in an evaluation."""
        self._rows = None if samples is None else samples.view(chunks, -1)
        self._known_chunks = [] if self._rows is None else self.known[self._rows].all(dim=1).tolist()

    @property
    def are_kept(self) -> bool:
        """Whether the step under way changes the copies."""
        return self._rows is not None

    def knows(self, chunk: int) -> bool:
        """Whether both ends have seen all samples of a chunk."""
        return self._rows is not None and self._known_chunks[chunk]

    def change(self, chunk: int, slot: int, x: Tensor) -> Tensor:
        """(1)"""
        return x.detach().float() - self._copy(chunk, slot, x.device)

    def apply(self, chunk: int, slot: int, change: Tensor) -> Tensor:
        """(3) and (4) for a change, in float32."""
        value = self._copy(chunk, slot, change.device).add_(change)
        self.remember(chunk, slot, value)
        return value

    def remember(self, chunk: int, slot: int, value: Tensor) -> None:
        """(4), if the step under way has copies.

        What float16 cannot hold is cut off, and what is not finite forgotten: the next change makes up for both.
        """
        if self._rows is None:
            return
        rows = self._rows[chunk]
        finite = value.detach().float().nan_to_num(nan=0.0).clamp_(-_LARGEST, _LARGEST)
        self._copies[slot].index_copy_(0, rows, finite.to(COPY_DTYPE).cpu())
        self.known[rows] = True

    def state_dict(self) -> dict[str, Tensor]:
        return {"known": self.known, **{str(slot): copies for slot, copies in self._copies.items()}}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.known.zero_()
        for key, value in state.items():
            if len(value) != self.samples:
                raise ValueError(f"copies of {self.samples} samples are kept here, these are of {len(value)}")
            if key == "known":
                self.known.copy_(value)
            else:
                self.reserve(int(key), value.shape[1:])
                self._copies[int(key)].copy_(value)

    def _copy(self, chunk: int, slot: int, device: torch.device) -> Tensor:
        assert self._rows is not None
        return self._copies[slot].index_select(0, self._rows[chunk]).to(device).float()

    def _allocate(self, shape: torch.Size) -> Tensor:
        if self.directory is None:
            return torch.zeros(shape, dtype=COPY_DTYPE)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Its name goes when the block ends and its bytes with the process: nothing is ever left behind. What must
            # outlast the process is in checkpoints.
            with tempfile.NamedTemporaryFile(dir=self.directory, prefix="thinpipe-copies-") as file:
                # A file with holes would end the process when the disk is full, not say so now.
                os.posix_fallocate(file.fileno(), 0, shape.numel() * COPY_DTYPE.itemsize)
                return torch.from_file(file.name, shared=True, size=shape.numel(), dtype=COPY_DTYPE).view(shape)
        except OSError as error:
            raise ValueError(
                f"copies of samples need {shape.numel() * COPY_DTYPE.itemsize / 1e6:.1f} MB in {self.directory}: "
                f"{error.strerror}. Make room, or name another place"
            ) from None


def copies_bytes(samples: int, chunk_shape: Sequence[int]) -> int:
    """What one end of a link keeps for one of the tensors of a chunk."""
    return samples * torch.Size(chunk_shape[1:]).numel() * COPY_DTYPE.itemsize


def check_samples(samples: Sequence[int] | Tensor, count: int) -> Tensor:
    """The numbers of a step's samples; ValueError unless each is one of ``count`` and there only once."""
    rows = torch.as_tensor(samples).cpu()
    if rows.dim() != 1 or rows.dtype.is_floating_point or rows.dtype == torch.bool:
        raise ValueError(f"the samples of a step are whole numbers in a row, got {rows.dim()}-D {rows.dtype}")
    rows = rows.long()
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
        wrong = rows[(rows < 0) | (rows >= count)][0]
        raise ValueError(f"samples are counted from 0 and there are {count}, got {wrong}")
    unique, times = rows.unique(return_counts=True)
    if len(unique) < len(rows):
        raise ValueError(f"the samples of a step are all different, got {unique[times > 1][0]} twice")
    return rows
