"""The cache of ``delta``: a copy of every sample's last value, in float16, identical at both ends of a link.

Values are clamped to the range of float16, and NaN becomes 0: the next change corrects both.
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
    """The copies of samples at one link end: in memory, or in a memory-mapped file in ``directory``."""

    def __init__(self, samples: int, directory: Path | None = None) -> None:
        self.samples, self.directory = samples, directory
        self.known = torch.zeros(samples, dtype=torch.bool)  # which samples have copies
        self._copies: dict[int, Tensor] = {}  # by slot: all samples
        self._rows: Tensor | None = None  # of the current step: the samples of each chunk
        self._known_chunks: list[bool] = []

    def reserve(self, slot: int, sample_shape: Sequence[int]) -> None:
        """Allocate the copies of one slot, unless they are allocated."""
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
        """Begin a step with these samples; None: its samples have no copies, as in an evaluation."""
        self._rows = None if samples is None else samples.view(chunks, -1)
        self._known_chunks = [] if self._rows is None else self.known[self._rows].all(dim=1).tolist()

    @property
    def are_kept(self) -> bool:
        """True if the current step updates the copies."""
        return self._rows is not None

    def knows(self, chunk: int) -> bool:
        """Return True if both ends have copies of all samples of a chunk."""
        return self._rows is not None and self._known_chunks[chunk]

    def change(self, chunk: int, slot: int, x: Tensor) -> Tensor:
        """Return the change of a chunk against its copy, (1) of ``delta``."""
        return x.detach().float() - self._copy(chunk, slot, x.device)

    def apply(self, chunk: int, slot: int, change: Tensor) -> Tensor:
        """Add a change to the copy and store the result, (3) and (4); return it in float32."""
        value = self._copy(chunk, slot, change.device).add_(change)
        self.store(chunk, slot, value)
        return value

    def store(self, chunk: int, slot: int, value: Tensor) -> None:
        """Store a value as the new copy, (4) of ``delta``, if the current step has copies."""
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
            # The file is unlinked when the block ends and its blocks are freed with the process, so no files are left
            # behind. State that must outlast the process is in checkpoints.
            with tempfile.NamedTemporaryFile(dir=self.directory, prefix="thinpipe-copies-") as file:
                # With a sparse file, a full disk would kill the process (SIGBUS) later instead of raising an error now.
                os.posix_fallocate(file.fileno(), 0, shape.numel() * COPY_DTYPE.itemsize)
                return torch.from_file(file.name, shared=True, size=shape.numel(), dtype=COPY_DTYPE).view(shape)
        except OSError as error:
            raise ValueError(
                f"copies of samples need {shape.numel() * COPY_DTYPE.itemsize / 1e6:.1f} MB in {self.directory}: "
                f"{error.strerror}. Free some space, or name another place"
            ) from None


def copies_bytes(samples: int, chunk_shape: Sequence[int]) -> int:
    """Return the bytes of the copies that one link end keeps for one slot."""
    return samples * torch.Size(chunk_shape[1:]).numel() * COPY_DTYPE.itemsize


def check_samples(samples: Sequence[int] | Tensor, count: int) -> Tensor:
    """Return the sample indices of a step; raise ValueError unless they are unique and in range(``count``)."""
    rows = torch.as_tensor(samples).cpu()
    if rows.dim() != 1 or rows.dtype.is_floating_point or rows.dtype == torch.bool:
        raise ValueError(f"the samples of a step are whole numbers in one dimension, got {rows.dim()}-D {rows.dtype}")
    rows = rows.long()
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
        wrong = rows[(rows < 0) | (rows >= count)][0]
        raise ValueError(f"samples are counted from 0 and there are {count}, got {wrong}")
    unique, times = rows.unique(return_counts=True)
    if len(unique) < len(rows):
        raise ValueError(f"the samples of a step are all different, got {unique[times > 1][0]} twice")
    return rows
