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

from pathlib import Path

import torch
from torch import Tensor

from thinpipe.codecs.base import Codec
from thinpipe.codecs.spec import codec
from thinpipe.links.link_codec import LinkCodec, WireFormat
from thinpipe.links.sample_cache import SampleCopies, copies_bytes
from thinpipe.links.slot import Slot

# Codec of a sample's first pass: its error is small compared with the change of one epoch, at a quarter of the bytes.
DEFAULT_FIRST = codec("uniform:8")


class Delta(LinkCodec):
    """A link codec that sends the change of a chunk if both ends have copies of all its samples, else its values."""

    needs_samples = True

    def __init__(self, change: Codec, first: Codec = DEFAULT_FIRST, copies: SampleCopies | None = None) -> None:
        super().__init__(first, change)
        self.change, self.first, self._copies = change, first, copies

    @classmethod
    def parse(cls, spec: str, *, samples: int | None, copies_in: Path | None) -> Delta:
        try:
            change, first = _parse(spec)
        except ValueError as error:
            raise ValueError(
                f"{spec!r} makes no sense: {error}; delta takes the codec of changes, and may name the one of a "
                "sample's first pass, as in delta(kmeans:2) or delta(kmeans:2,first=fp16)"
            ) from None
        return cls(change, first, None if samples is None else SampleCopies(samples, copies_in))

    @property
    def spec(self) -> str:
        first = "" if self.first == DEFAULT_FIRST else f",first={self.first.spec}"
        return f"delta({self.change.spec}{first})"

    @property
    def evaluation_spec(self) -> str:
        return self.first.spec

    def check_direction(self, direction: str) -> None:
        if direction == "backward":
            raise ValueError(
                f"{self.spec} is for activations, which change less as training goes on. The gradient of a sample is "
                "no prediction of its next one, so their difference is no smaller than they are. Give gradients "
                f"another codec, as in {self.change.spec}"
            )

    def wire_formats(self, slot: Slot, chunks: int = 1) -> tuple[WireFormat, ...]:
        first, change = WireFormat.of(slot, self.first), WireFormat.of(slot, self.change)
        return (first,) if change.raw else (first, change)

    def wire_format(self, chunk: int, index: int) -> WireFormat:
        return self._formats[index][-1 if self._copies is not None and self._copies.knows(chunk) else 0]

    @property
    def copies(self) -> SampleCopies:
        assert self._copies is not None  # stages ensure it
        return self._copies

    def begin_step(self, step: int, training: bool, samples: Tensor | None = None) -> None:
        super().begin_step(step, training)
        if not training:
            samples = None
        elif samples is None:
            raise ValueError(
                f"{self.spec} sends what changed of each sample: before a training step pass the indices of its "
                f"samples to all stages, stage.set_samples(indices); stage {self.route.stage} has none"
            )
        for index, slot in enumerate(self.slots):
            if samples is not None and self._has_copies(index) and slot.shape[0] * self.chunks != len(samples):
                raise ValueError(
                    f"{self.spec} keeps a copy of every sample: the {self.route} carries {self.chunks} chunks of "
                    f"{slot}, whose first dimension is to be that of the samples, but the step has {len(samples)}"
                )
        self.reserve()
        self.copies.begin(samples, self.chunks)

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
        else:
            super().decode(chunk, index, wire, out)
            self.observe_raw(chunk, index, out)

    def observe_raw(self, chunk: int, index: int, value: Tensor) -> None:
        if self._has_copies(index):
            self.copies.store(chunk, index, value)

    def _has_copies(self, index: int) -> bool:
        return len(self._formats[index]) > 1

    def _apply(self, chunk: int, index: int, wire: Tensor, device: torch.device) -> Tensor:
        """Return the new values of a chunk's samples in float32, after updating their copies."""
        change = torch.empty(self.slots[index].shape, dtype=torch.float32, device=device)
        return self.copies.apply(chunk, index, self.change.decode(wire, change))

    def reserved_bytes(self) -> int:
        cached = [slot for index, slot in enumerate(self.slots) if self._has_copies(index)]
        return sum(copies_bytes(self.copies.samples, slot.shape) for slot in cached)

    def reserve(self) -> None:
        for index, slot in enumerate(self.slots):
            if self._has_copies(index):
                self.copies.reserve(index, slot.shape[1:])

    def shared_state_dict(self) -> dict[str, Tensor]:
        return self.copies.state_dict()

    def load_shared_state_dict(self, state: dict[str, Tensor]) -> None:
        self.copies.load_state_dict(state)


def _parse(spec: str) -> tuple[Codec, Codec]:
    """Return the codecs of changes and of first passes."""
    if not spec.endswith(")"):
        raise ValueError("its bracket is not closed")
    inside = spec.removeprefix("delta(")[:-1]
    if "delta(" in inside:
        raise ValueError("a change of changes is not sent: there is one delta in a spec")
    text, *options = inside.split(",")
    if [option.partition("=")[0].strip() for option in options] not in ([], ["first"]):
        raise ValueError(f"{','.join(options)!r} is not first=SPEC")
    change, first = codec(text), codec(options[0].partition("=")[2]) if options else DEFAULT_FIRST
    for each in (change, first):
        if not each.decodes_alike:
            raise ValueError(f"both ends of a link must decode the same bits, and {each.spec} does not promise that")
    if change.spec == "none":
        raise ValueError("an uncompressed change saves nothing; none alone sends the same bytes")
    if not change.leaves_less:
        raise ValueError(
            f"the two levels of {change.spec} are the ends of its range: what it leaves of a change is as wide as "
            "the change was, and copies drift away pass by pass. Take 2 bits or more, or kmeans:1"
        )
    return change, first
