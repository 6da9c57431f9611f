"""delta(...): delta coding of each sample against a copy of its last value that both ends of a link keep.

       sender                                        receiver

  (1)  change = x - copy
  (2)  encode                     ---- wire ---->
  (3)  value = copy + decode(wire)              (3)  value = copy + decode(wire), which the stage computes with
  (4)  copy = value as float16                  (4)  copy = value as float16

(3) and (4) are the same operations on the same bytes, so the copies stay equal without further messages. (1) is taken
against the receiver's value, which includes the errors of earlier passes, so errors do not accumulate. A copy in half
precision makes the next change slightly larger but no message less exact: the stage gets the value before (4).

A chunk with a sample that was never sent is sent in full with the first codec, and (3) is its decoded value.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.codecs.base import Codec
from thinpipe.codecs.spec import codec
from thinpipe.links.encoding import Encoding, Form
from thinpipe.links.slot import Slot

# Codec of a sample's first pass: its error is small compared with the change of one epoch, at a quarter of the bytes.
DEFAULT_FIRST = codec("uniform:8")
COPY_DTYPE = torch.float16
_LARGEST = torch.finfo(COPY_DTYPE).max


class Delta(Encoding):
    """An encoding that sends the change of a chunk if both ends have copies of all its samples, else its values."""

    needs_samples = True

    def __init__(self, change: Codec, first: Codec, copies: SampleCopies | None = None) -> None:
        super().__init__()
        self.change, self.first, self._copies = change, first, copies

    @property
    def spec(self) -> str:
        first = "" if self.first == DEFAULT_FIRST else f",first={self.first.spec}"
        return f"delta({self.change.spec}{first})"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return self.first, self.change

    def forms(self, slot: Slot, chunks: int = 1) -> tuple[Form, ...]:
        first, change = Form.of(slot, self.first), Form.of(slot, self.change)
        return (first,) if change.raw else (first, change)

    def form(self, chunk: int, index: int) -> Form:
        return self._forms[index][-1 if self._copies is not None and self._copies.knows(chunk) else 0]

    @property
    def copies(self) -> SampleCopies:
        assert self._copies is not None  # stages ensure it
        return self._copies

    def encode(self, chunk: int, index: int, tensor: Tensor, wire: Tensor) -> None:
        """Encode a tensor, and decode it again: copies must change by the values that the receiver decodes."""
        if not self._has_copies(index):
            super().encode(chunk, index, tensor, wire)
        elif self.copies.knows(chunk):
            super().encode(chunk, index, self.copies.change(chunk, index, tensor), wire)
            self._apply(chunk, index, wire, tensor.device)
        else:
            super().encode(chunk, index, tensor, wire)
            if self.copies.are_kept:
                slot = self.slots[index]
                self.decode(chunk, index, wire, torch.empty(slot.shape, dtype=slot.dtype, device=tensor.device))

    def decode(self, chunk: int, index: int, wire: Tensor, out: Tensor) -> None:
        if self._has_copies(index) and self.copies.knows(chunk):
            out.copy_(self._apply(chunk, index, wire, out.device))
            return
        super().decode(chunk, index, wire, out)
        self.remember(chunk, index, out)

    def remember(self, chunk: int, index: int, value: Tensor) -> None:
        if self._has_copies(index):
            self.copies.remember(chunk, index, value)

    def _has_copies(self, index: int) -> bool:
        return len(self._forms[index]) > 1

    def _apply(self, chunk: int, index: int, wire: Tensor, device: torch.device) -> Tensor:
        """Return the new values of a chunk's samples in float32, after updating their copies."""
        change = torch.empty(self.slots[index].shape, dtype=torch.float32, device=device)
        return self.copies.apply(chunk, index, self.change.decode(wire, change))

    def begin_samples(self, samples: Tensor | None, chunks: int) -> None:
        for index, slot in enumerate(self.slots):
            if samples is not None and self._has_copies(index) and slot.shape[0] * chunks != len(samples):
                raise ValueError(
                    f"{self.spec} keeps a copy of every sample: the {self.route} carries {chunks} chunks of {slot}, "
                    f"whose first dimension is to be that of the samples, but the step was said to have {len(samples)}"
                )
        self.reserve_copies()
        self.copies.begin(samples, chunks)

    def copies_bytes(self) -> int:
        kept = [slot for index, slot in enumerate(self.slots) if self._has_copies(index)]
        return sum(copies_bytes(self.copies.samples, slot.shape) for slot in kept)

    def reserve_copies(self) -> None:
        for index, slot in enumerate(self.slots):
            if self._has_copies(index):
                self.copies.reserve(index, slot.shape[1:])

    def shared_state_dict(self) -> dict[str, Tensor]:
        return self.copies.state_dict()

    def load_shared_state_dict(self, state: dict[str, Tensor]) -> None:
        self.copies.load_state_dict(state)


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
        """Return the change of a chunk against its copy, (1)."""
        return x.detach().float() - self._copy(chunk, slot, x.device)

    def apply(self, chunk: int, slot: int, change: Tensor) -> Tensor:
        """Add a change to the copy and store the result, (3) and (4); return it in float32."""
        value = self._copy(chunk, slot, change.device).add_(change)
        self.remember(chunk, slot, value)
        return value

    def remember(self, chunk: int, slot: int, value: Tensor) -> None:
        """Store a value as the new copy, (4), if the current step has copies.

        Values are clamped to the range of float16, and NaN becomes 0: the next change corrects both.
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
            # The file is unlinked when the block ends and its blocks are freed with the process, so no files are left
            # behind. State that must outlast the process is in checkpoints.
            with tempfile.NamedTemporaryFile(dir=self.directory, prefix="thinpipe-copies-") as file:
                # With a sparse file, a full disk would kill the process (SIGBUS) later instead of raising an error now.
                os.posix_fallocate(file.fileno(), 0, shape.numel() * COPY_DTYPE.itemsize)
                return torch.from_file(file.name, shared=True, size=shape.numel(), dtype=COPY_DTYPE).view(shape)
        except OSError as error:
            raise ValueError(
                f"copies of samples need {shape.numel() * COPY_DTYPE.itemsize / 1e6:.1f} MB in {self.directory}: "
                f"{error.strerror}. Make room, or name another place"
            ) from None


def copies_bytes(samples: int, chunk_shape: Sequence[int]) -> int:
    """Return the bytes of the copies that one link end keeps for one slot."""
    return samples * torch.Size(chunk_shape[1:]).numel() * COPY_DTYPE.itemsize


def check_samples(samples: Sequence[int] | Tensor, count: int) -> Tensor:
    """Return the sample indices of a step; raise ValueError unless they are unique and in range(``count``)."""
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
