"""delta(...): the change of each sample since it was last sent, against a copy that both ends of a link keep."""

from __future__ import annotations

import torch
from torch import Tensor

from thinpipe.codecs.base import Codec
from thinpipe.codecs.spec import codec
from thinpipe.pipeline.links.copies import SampleCopies, copies_bytes
from thinpipe.pipeline.links.encoding import Encoding, Form
from thinpipe.pipeline.links.slot import Slot

# Of a sample's first pass: its error is small beside what a pass over the data changes, at a quarter of the bytes.
DEFAULT_FIRST = codec("uniform:8")


class Delta(Encoding):
    """A chunk whose samples both ends have seen travels as its change, another one as it is."""

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
        assert self._copies is not None  # stages see to it
        return self._copies

    def encode(self, chunk: int, index: int, tensor: Tensor, wire: Tensor) -> None:
        """Copies change by what the receiver decodes, so the sender decodes it too."""
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
        """A sample's new value, in float32; its copy is the same."""
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
