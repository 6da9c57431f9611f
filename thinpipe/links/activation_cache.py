"""The activation cache: activations that are the same in every epoch, those of frozen layers, are sent once.

    first epoch     compute, encode each sample by itself   ---- wires ---->   decode them, keep them by sample
    later epochs    nothing                                                    decode the wires that were kept

Both ends, and all stages before them, derive from the samples of the steps alone which chunks have been sent, so there
are no further messages. A chunk is sent unless all of its samples were.

Each sample is encoded by itself, with a key of its own: its decoded value depends neither on the rest of the batch nor
on the step. So a run that keeps nothing and sends all activations in every epoch has the same losses.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.codecs.base import Codec, as_bytes
from thinpipe.codecs.rounding import rounding_key
from thinpipe.links.link_codec import CodecAdapter, WireFormat
from thinpipe.links.slot import Slot

ALIGNMENT = 16  # bytes, of the wire of a sample: kernels read it as wider integers


class SentSamples:
    """The samples whose activations have been sent, and the chunks of the current step that need not be sent."""

    def __init__(self, samples: int, *, keeps: bool = True) -> None:
        self.samples, self.keeps = samples, keeps
        self._sent = torch.zeros(samples, dtype=torch.bool)
        self._rows: Tensor | None = None  # of the current step: the samples of each chunk
        self._known: list[bool] = []

    def begin(self, samples: Tensor | None, chunks: int) -> None:
        """Begin a step with these samples; those of the last step have been sent. None: they are not known."""
        if self._rows is not None and self.keeps:
            self._sent[self._rows.flatten()] = True
        self._rows = None if samples is None else samples.cpu().view(chunks, -1)
        self._known = [] if self._rows is None else self._sent[self._rows].all(dim=1).tolist()

    def rows(self, chunk: int) -> Tensor | None:
        """Return the samples of a chunk; None if they are not known."""
        return None if self._rows is None else self._rows[chunk]

    def has(self, chunk: int) -> bool:
        """Return True if the receiver has all samples of a chunk."""
        return self._rows is not None and self._known[chunk]

    def forget(self) -> None:
        """Send all samples again: call it at all stages if the receiver was replaced."""
        self._sent.zero_()
        self._rows = None


class SampleCodec(CodecAdapter):
    """A codec that encodes every sample by itself; at the end that ``stores``, also the cache of its wires."""

    def __init__(self, codec: Codec, sent: SentSamples, *, stores: bool = False, directory: Path | None = None) -> None:
        super().__init__(codec)
        self.sent, self.stores, self._directory = sent, stores and sent.keeps, directory
        self._wires: dict[int, Tensor] = {}  # by slot: [samples, bytes]

    def wire_formats(self, slot: Slot, chunks: int = 1) -> tuple[WireFormat, ...]:
        one, rows = WireFormat.of(_sample_of(slot), self.codecs[0]), slot.shape[0]
        wire_bytes = rows * _aligned(one.wire_bytes)
        if one.raw or wire_bytes >= slot.tensor_bytes:
            return (WireFormat(slot.tensor_bytes, None, True),)
        return (WireFormat(wire_bytes, one.codec, False),)

    def reserve(self) -> None:
        for index in range(len(self.slots) if self.stores else 0):
            if index not in self._wires:
                self._wires[index] = allocate((self.sent.samples, self._row_bytes(index)), torch.uint8, self._directory)

    def encode(self, chunk: int, index: int, tensor: Tensor, wire: Tensor) -> None:
        codec, size = self.codecs[0], self._wire_bytes(index)
        for row, (x, part) in enumerate(zip(tensor.detach().split(1), wire.view(len(tensor), -1), strict=True)):
            codec.encode(x, part[:size], key=self._key(chunk, index, row))
            part[size:].zero_()

    def decode(self, chunk: int, index: int, wire: Tensor, out: Tensor) -> None:
        if self.wire_format(chunk, index).raw:
            super().decode(chunk, index, wire, out)
        else:
            self._decode(index, wire.view(len(out), -1), out)
        self._store(chunk, index, wire)

    def observe_raw(self, chunk: int, index: int, value: Tensor) -> None:
        if self.stores:
            self._store(chunk, index, as_bytes(value.detach().contiguous()))

    def recall(self, chunk: int, index: int, out: Tensor) -> None:
        """Decode the wires of a chunk that was sent before."""
        samples = self.sent.rows(chunk)
        assert samples is not None
        wires = self._wires[index][samples].to(out.device)
        if self.wire_format(chunk, index).raw:
            as_bytes(out).copy_(wires.flatten())
        else:
            self._decode(index, wires, out)

    def _decode(self, index: int, wires: Tensor, out: Tensor) -> None:
        size = self._wire_bytes(index)
        for part, x in zip(wires, out.split(1), strict=True):
            self.codecs[0].decode(part[:size], x)

    def _store(self, chunk: int, index: int, wire: Tensor) -> None:
        samples = self.sent.rows(chunk) if self.stores else None
        if samples is not None:
            self.reserve()
            self._wires[index][samples] = wire.view(len(samples), -1).cpu()

    def _key(self, chunk: int, index: int, row: int) -> int:
        samples = self.sent.rows(chunk)
        place = (self.step, chunk, row) if samples is None else (int(samples[row]),)
        return rounding_key(self.seed, self.route.source, self.route.target, index, *place)

    def _wire_bytes(self, index: int) -> int:
        """Return the bytes of a sample's wire, without padding."""
        return WireFormat.of(_sample_of(self.slots[index]), self.codecs[0]).wire_bytes

    def _row_bytes(self, index: int) -> int:
        return self._formats[index][0].wire_bytes // self.slots[index].shape[0]


def check_samples(samples: Sequence[int] | Tensor, count: int) -> Tensor:
    """Return the sample indices of a step; raise ValueError unless they are in range(``count``)."""
    rows = torch.as_tensor(samples).cpu()
    if rows.dim() != 1 or rows.dtype.is_floating_point or rows.dtype == torch.bool:
        raise ValueError(f"the samples of a step are whole numbers in one dimension, got {rows.dim()}-D {rows.dtype}")
    rows = rows.long()
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
        wrong = rows[(rows < 0) | (rows >= count)][0]
        raise ValueError(f"samples are counted from 0 and there are {count}, got {wrong}")
    return rows


def allocate(shape: tuple[int, ...], dtype: torch.dtype, directory: Path | None) -> Tensor:
    """Return zeros in memory, or in a memory-mapped file in ``directory`` that is deleted with the process."""
    if directory is None:
        return torch.zeros(shape, dtype=dtype)
    count = torch.Size(shape).numel()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # The file is unlinked when the block ends and its blocks are freed with the process, so no files are left
        # behind.
        with tempfile.NamedTemporaryFile(dir=directory, prefix="thinpipe-cache-") as file:
            # With a sparse file, a full disk would kill the process (SIGBUS) later instead of raising an error now.
            os.posix_fallocate(file.fileno(), 0, max(count, 1) * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        raise ValueError(
            f"a cache needs {count * dtype.itemsize / 1e6:.1f} MB in {directory}: {error.strerror}. Free some space, "
            "or name another place"
        ) from None


def _sample_of(slot: Slot) -> Slot:
    return Slot(torch.Size([1, *slot.shape[1:]]), slot.dtype)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
