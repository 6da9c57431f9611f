"""axes:B on a link: the sender learns a PCA basis of the rows it sends, and transmits it in its messages.

    step                      sender                                       receiver
    t             begins      (1) starts to learn from steps before t
    t + LEAD      messages    (2) carry the new basis, in parts            joins the parts
    t + LEAD + 1  begins      (3) both encode and decode with that basis

Both ends count the training steps, so before each step both know whether its messages carry a basis, and the size of
every message. (1) runs in a thread and does not block training: the eigendecomposition takes longer than everything
else here together. Until the first (3), tensors are encoded with FIRST.

t follows from shapes (``is_due``): not before START, except with ``+now``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinpipe.codecs.base import Codec
from thinpipe.codecs.normal import MAX_BITS
from thinpipe.codecs.spec import codec
from thinpipe.links.learned.learner import LEAD, BasisLearner, BasisUpdate, first_due, is_due, sender_projection
from thinpipe.links.learned.row_layout import Rows, rows_of
from thinpipe.links.learned.transform import MIN_BITS, Basis, decode, encode
from thinpipe.links.link_codec import BasisSchedule, LinkCodec, WireFormat
from thinpipe.links.slot import Slot

FIRST_BITS = 8
FIRST = codec(f"tile:{FIRST_BITS}")
# Early in training, activations change faster than the basis is updated, and the resulting loss is not recovered: after
# 250 steps a small language model (6 layers, 128 wide, one seed) had a validation loss of 1.919 uncompressed, 1.934
# with axes:2.25, and 2.258 with axes:2.25+now.
START = 32


@dataclass
class _SlotState:
    """The progress of a slot's basis at one end."""

    key: tuple[int, ...]  # of its rows, and their bit planes
    steps: int = 0  # training steps
    countdown: int = 0  # steps until (2), while a basis is being learned: 1 is the next step
    current: BasisUpdate | None = None  # in use
    incoming: BasisUpdate | None = None  # carried by the messages of the current or the last step
    bases: dict[float, Basis] = field(default_factory=dict)  # of ``current``, by bits per value

    def adopt(self) -> None:
        """Switch to the transmitted basis, (3)."""
        if self.incoming is not None:
            self.current, self.incoming, self.bases = self.incoming, None, {}


class PCACodec(LinkCodec):
    """PCA transform coding: rows are encoded in a basis learned from earlier rows."""

    needs_basis = True

    def __init__(self, bits: float, *more_bits: float, now: bool = False, first: Codec = FIRST) -> None:
        super().__init__(first)
        if not MIN_BITS <= bits <= MAX_BITS:
            raise ValueError(f"{bits:g} bits are not from {MIN_BITS} to {MAX_BITS}")
        self.bits, self._more_bits, self._start = bits, more_bits, 0 if now else START
        self._rows: list[Rows | None] = []  # by slot; None: always FIRST, or raw
        self._slots: dict[int, _SlotState] = {}
        self._learners: dict[int, BasisLearner] = {}

    @classmethod
    def parse(cls, spec: str) -> PCACodec:
        bits, plus, now = spec.removeprefix("axes:").partition("+")
        try:
            if plus and now.strip() != "now":
                raise ValueError(f"its option is now, not {now.strip()!r}")
            return cls(float(bits), now=bool(plus))
        except ValueError as error:
            raise ValueError(
                f"{spec!r} makes no sense: {error}; axes takes the bits per value on average, from 0.5 to 8, as in "
                "axes:2 or axes:1.5, and +now to begin at once"
            ) from None

    @property
    def spec(self) -> str:
        return f"axes:{self.bits:g}{'' if self._start else '+now'}"

    @property
    def immediate_spec(self) -> str:
        return f"axes:{self.bits:g}+now"

    def check_direction(self, direction: str) -> None:
        if direction == "backward":
            raise ValueError(
                f"{self.spec} is for activations, whose rows vary along few axes. Gradients do not, and what they "
                "would lose makes training diverge. Give gradients another codec, as in tile:4+zero"
            )

    # Sizes

    def wire_formats(self, slot: Slot, chunks: int = 1) -> tuple[WireFormat, ...]:
        first, rows = WireFormat.of(slot, self.codecs[0]), self._rows_of(slot, chunks)
        return (first,) if rows is None else (first, WireFormat(rows.wire_bytes(self.bits), None, False))

    def _rows_of(self, slot: Slot, chunks: int) -> Rows | None:
        raw = WireFormat.of(slot, self.codecs[0]).raw
        return None if raw else rows_of(slot.shape, self.bits, chunks, self._more_bits)

    def basis_schedule(self, slot: Slot, chunks: int = 1) -> BasisSchedule:
        rows = self._rows_of(slot, chunks)
        if rows is None:
            return BasisSchedule()
        first = first_due(rows, chunks, self._start)
        return BasisSchedule(chunks * _part(rows, chunks), rows.every(self.bits, chunks), first + LEAD + 1, FIRST_BITS)

    def warm_up(self, slot: Slot, chunks: int, device: torch.device) -> None:
        super().warm_up(slot, chunks, device)
        rows = self._rows_of(slot, chunks)
        if rows is None:
            return
        x = torch.zeros(slot.shape, dtype=slot.dtype, device=device)
        learner, columns = BasisLearner({}, rows, self.bits, chunks), rows.columns(x)
        learner.add(columns)
        learner.fold()
        encoded = torch.zeros(rows.basis_bytes, dtype=torch.uint8, device=device)
        projection = torch.zeros(rows.groups, rows.size, rows.size, device=device)
        basis = Basis.read(encoded, rows, self.bits, projection)
        wire = torch.empty(rows.wire_bytes(self.bits), dtype=torch.uint8, device=device)
        encode(columns, basis, rows, wire)
        decode(wire, basis, rows, x)

    def configure(self, slots: Sequence[Slot], chunks: int = 1) -> None:
        super().configure(slots, chunks)
        self._rows = [self._rows_of(slot, chunks) for slot in slots]

    def max_bytes(self, index: int) -> int:
        rows = self._rows[index]
        return super().max_bytes(index) + (0 if rows is None else _part(rows, self.chunks))

    def wire_format(self, chunk: int, index: int) -> WireFormat:
        found = self._plain_format(chunk, index)
        return found._replace(wire_bytes=found.wire_bytes + self._carried(index))

    def _plain_format(self, chunk: int, index: int) -> WireFormat:
        """Return the format of a tensor in the current step, without the part of a basis that its message carries."""
        return self._formats[index][0 if self._basis_of(chunk, index) is None else -1]

    def _carried(self, index: int) -> int:
        """Return the bytes of the basis in each message of a slot in the current step."""
        state = self._slots.get(index)
        if not self.training or state is None or state.incoming is None:
            return 0
        return len(state.incoming.encoded) // self.chunks

    # A step

    def begin_step(self, step: int, training: bool) -> None:
        super().begin_step(step, training)
        for index, rows in enumerate(self._rows):
            if index in self._slots:
                self._slots[index].adopt()
            if rows is not None and training:
                self._begin_training(index, rows)

    def _begin_training(self, index: int, rows: Rows) -> None:
        """Count a training step of a slot; start (1) or (2) if it is their time."""
        state = self._slots.get(index)
        if state is None or state.key != self._key(rows):  # the first step, or the first one with other shapes
            state = self._slots[index] = _SlotState(self._key(rows))
            self._state.pop(index, None)
        learner = self._learner(index, rows) if self.route.sends else None
        if state.countdown == 1:
            state.incoming = self._incoming(learner, rows)
        left = max(0, state.countdown - 1)
        due = not left and is_due(state.steps, rows, self.bits, self.chunks, self._start)
        state.steps, state.countdown = state.steps + 1, LEAD if due else left
        if learner is not None:
            learner.fold()
            if due:
                learner.start()

    def _incoming(self, learner: BasisLearner | None, rows: Rows) -> BasisUpdate:
        """Return the basis that the messages of the current step carry, (2): at a receiver, memory for it."""
        size = self.chunks * _part(rows, self.chunks)
        if learner is None:
            return BasisUpdate(torch.empty(size, dtype=torch.uint8, device=self.route.device), None)
        encoded, projection = learner.take()
        return BasisUpdate(torch.nn.functional.pad(encoded, (0, size - len(encoded))), projection)

    def _learner(self, index: int, rows: Rows) -> BasisLearner:
        """Return the learner of a slot of a sender; make a new one after a state was loaded or chunk sizes changed."""
        state, learner = self._state.setdefault(index, {}), self._learners.get(index)
        if learner is None or learner.state is not state or learner.rows != rows or learner.chunks != self.chunks:
            if learner is not None:
                learner.finish()
            learner = self._learners[index] = BasisLearner(state, rows, self.bits, self.chunks)
        return learner

    def encode(self, chunk: int, index: int, tensor: Tensor, wire: Tensor) -> None:
        rows, basis, end = self._rows[index], self._basis_of(chunk, index), len(wire) - self._carried(index)
        columns = None if rows is None else rows.columns(tensor.detach())
        if basis is None:
            super().encode(chunk, index, tensor, wire[:end])
        else:
            assert rows is not None
            assert columns is not None
            encode(columns, basis, rows, wire[:end])
        if end < len(wire):
            wire[end:].copy_(self._parts(index)[chunk])
        if columns is not None and self.training:
            self._learners[index].add(columns)

    def decode(self, chunk: int, index: int, wire: Tensor, out: Tensor) -> None:
        rows, basis, end = self._rows[index], self._basis_of(chunk, index), len(wire) - self._carried(index)
        if basis is None:
            super().decode(chunk, index, wire[:end], out)
        else:
            assert rows is not None
            decode(wire[:end], basis, rows, out)
        if end < len(wire):
            self._parts(index)[chunk].copy_(wire[end:])

    def _basis_of(self, chunk: int, index: int) -> Basis | None:
        """Return the basis that encodes a tensor in the current step; None if a codec does."""
        return self._basis(index, self.bits)

    def _basis(self, index: int, bits: float) -> Basis | None:
        """Return the basis of a slot in the current step; None if there is none."""
        rows, state = self._rows[index], self._slots.get(index)
        if rows is None or state is None or state.current is None or state.key != self._key(rows):
            return None
        if bits not in state.bases:
            encoded, projection = state.current.encoded[: rows.basis_bytes], state.current.projection
            if self.route.sends and projection is None:  # of a resumed run
                projection = sender_projection(encoded, rows)
            state.bases[bits] = Basis.read(encoded, rows, bits, projection)
        return state.bases[bits]

    def _parts(self, index: int) -> Tensor:
        incoming = self._slots[index].incoming
        assert incoming is not None
        return incoming.encoded.view(self.chunks, -1)

    def _key(self, rows: Rows) -> tuple[int, ...]:
        return *rows.key, *(rows.planes(bits) for bits in (self.bits, *self._more_bits))

    # The basis is known to both ends and saved by one; the moments it is learned from are state of the sender.

    def state_dict(self) -> dict[str, Tensor]:
        for learner in self._learners.values():
            learner.finish()
        return super().state_dict()

    def shared_state_dict(self) -> dict[str, Tensor]:
        shared: dict[str, Tensor] = {}
        for index, state in self._slots.items():
            state.adopt()
            steps = torch.tensor([state.steps, state.countdown])
            shared |= {f"{index}.rows": torch.tensor(state.key), f"{index}.steps": steps}
            if state.current is not None:
                shared[f"{index}.known"] = state.current.encoded
        return shared

    def load_shared_state_dict(self, state: dict[str, Tensor]) -> None:
        before, self._slots = self._slots, {}
        for index in {int(key.partition(".")[0]) for key in state}:
            steps, countdown = state[f"{index}.steps"].tolist()
            loaded = self._slots[index] = _SlotState(tuple(state[f"{index}.rows"].tolist()), steps, countdown)
            known = state.get(f"{index}.known")
            if known is not None:
                loaded.current = BasisUpdate(known.to(self.route.device), None)
                last = before[index].current if index in before else None
                if last is not None and last.encoded is loaded.current.encoded:
                    loaded.bases = before[index].bases  # the case in an evaluation, batch after batch


def _part(rows: Rows, chunks: int) -> int:
    """Return the bytes of the basis that each message of a step carries; the last one may be zero-padded."""
    return -(-rows.basis_bytes // chunks)
