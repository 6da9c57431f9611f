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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinpipe.codecs.normal import MAX_BITS
from thinpipe.codecs.spec import codec
from thinpipe.links.encoding import Form, Learning, Plain
from thinpipe.links.learned.principal import LEAD, Learner, first_due, is_due, sender_side, warm_up_learner
from thinpipe.links.learned.transform import LEAST_BITS, Basis, Rows, decode, encode, rows_of
from thinpipe.links.slot import Slot

FIRST_BITS = 8
FIRST = codec(f"tile:{FIRST_BITS}")
# Early in training, activations change faster than the basis is updated, and the resulting loss is not recovered: after
# 250 steps a small language model (6 layers, 128 wide, one seed) had a validation loss of 1.919 uncompressed, 1.934
# with axes:2.25, and 2.258 with axes:2.25+now.
START = 32


@dataclass(frozen=True)
class LearnedForm(Form):
    """The wire format of rows in a learned basis: neither raw nor encoded with a codec."""

    @property
    def raw(self) -> bool:
        return False


@dataclass
class _Learned:
    """The learning state of a slot at one end."""

    key: tuple[int, ...]  # of its rows, and their bit planes
    steps: int = 0  # training steps
    left: int = 0  # steps until (2), while a basis is being learned: 1 is the next step
    known: Tensor | None = None  # the basis in use, as it was sent
    forth: Tensor | None = None  # the sender's projection matrix of that basis
    travelling: Tensor | None = None  # the next basis, sent in the current or the last step
    next_forth: Tensor | None = None
    basis: Basis | None = None  # of ``known``

    def adopt(self) -> None:
        """Switch to the transmitted basis, (3)."""
        if self.travelling is not None:
            self.known, self.forth, self.basis = self.travelling, self.next_forth, None
            self.travelling = self.next_forth = None


class Axes(Plain):
    """PCA transform coding: rows are encoded in a basis learned from earlier rows."""

    def __init__(self, bits: float, *, now: bool = False) -> None:
        super().__init__(FIRST)
        if not LEAST_BITS <= bits <= MAX_BITS:
            raise ValueError(f"{bits:g} bits are not from {LEAST_BITS} to {MAX_BITS}")
        self.bits, self._start = bits, 0 if now else START
        self._rows: list[Rows | None] = []
        self._learned: dict[int, _Learned] = {}
        self._learners: dict[int, Learner] = {}

    @property
    def spec(self) -> str:
        return f"axes:{self.bits:g}{'' if self._start else '+now'}"

    def forms(self, slot: Slot, chunks: int = 1) -> tuple[Form, ...]:
        first, rows = Form.of(slot, FIRST), self._rows_of(slot, chunks)
        return (first,) if rows is None else (first, LearnedForm(None, rows.wire_bytes(self.bits)))

    def _rows_of(self, slot: Slot, chunks: int) -> Rows | None:
        """Return the rows of a slot; None if its tensors are always encoded with FIRST or sent raw."""
        return None if Form.of(slot, FIRST).raw else rows_of(slot.shape, self.bits, chunks)

    def learning(self, slot: Slot, chunks: int = 1) -> Learning:
        rows = self._rows_of(slot, chunks)
        if rows is None:
            return super().learning(slot, chunks)
        first = first_due(rows, chunks, self._start)
        return Learning(chunks * _part(rows, chunks), rows.every(self.bits, chunks), first + LEAD + 1, FIRST_BITS)

    def configure(self, slots: Sequence[Slot], chunks: int = 1) -> None:
        super().configure(slots, chunks)
        self._rows = [self._rows_of(slot, chunks) for slot in slots]

    def most_bytes(self, index: int) -> int:
        rows = self._rows[index]
        return super().most_bytes(index) + (0 if rows is None else _part(rows, self.chunks))

    def form(self, chunk: int, index: int) -> Form:
        form, carried = self._forms[index][-1 if self._basis(index) is not None else 0], self._carried(index)
        return replace(form, wire_bytes=form.wire_bytes + carried) if carried else form

    def begin_traffic(self, training: bool) -> None:
        super().begin_traffic(training)
        for index, rows in enumerate(self._rows):
            if index in self._learned:
                self._learned[index].adopt()
            if rows is not None and training:
                self._begin_training(index, rows)

    def _begin_training(self, index: int, rows: Rows) -> None:
        learned = self._learned.get(index)
        if learned is None or learned.key != self._key(rows):  # the first step, or the first one with other shapes
            learned = self._learned[index] = _Learned(self._key(rows))
            self._state.pop(index, None)
        learner = self._learner(index, rows) if self.route.sends else None
        if learned.left == 1:
            self._carry(learned, learner, rows)
        left = max(0, learned.left - 1)
        due = not left and is_due(learned.steps, rows, self.bits, self.chunks, self._start)
        learned.steps, learned.left = learned.steps + 1, LEAD if due else left
        if learner is not None:
            learner.fold()
            if due:
                learner.start()

    def _carry(self, learned: _Learned, learner: Learner | None, rows: Rows) -> None:
        """Set the basis that the messages of the current step carry, (2)."""
        size = self.chunks * _part(rows, self.chunks)
        if learner is None:
            learned.travelling = torch.empty(size, dtype=torch.uint8, device=self.route.device)
        else:
            told, learned.next_forth = learner.take()
            learned.travelling = torch.nn.functional.pad(told, (0, size - len(told)))

    def _learner(self, index: int, rows: Rows) -> Learner:
        """Return the learner of a slot of a sender; make a new one after a state was loaded or chunk sizes changed."""
        kept, learner = self._state.setdefault(index, {}), self._learners.get(index)
        if learner is None or learner.kept is not kept or learner.rows != rows or learner.chunks != self.chunks:
            if learner is not None:
                learner.resolve()
            learner = self._learners[index] = Learner(kept, rows, self.bits, self.chunks)
        return learner

    def encode(self, chunk: int, index: int, tensor: Tensor, wire: Tensor) -> None:
        rows, basis, end = self._rows[index], self._basis(index), len(wire) - self._carried(index)
        if rows is None:
            super().encode(chunk, index, tensor, wire)
            return
        columns = rows.columns(tensor.detach())
        if basis is None:
            FIRST.encode(tensor, wire[:end])
        else:
            encode(columns, basis, rows, wire[:end])
        if end < len(wire):
            wire[end:].copy_(self._parts(index)[chunk])
        if self.training:
            self._learners[index].add(columns)

    def decode(self, chunk: int, index: int, wire: Tensor, out: Tensor) -> None:
        rows, basis, end = self._rows[index], self._basis(index), len(wire) - self._carried(index)
        if rows is None:
            super().decode(chunk, index, wire, out)
            return
        if basis is None:
            FIRST.decode(wire[:end], out)
        else:
            decode(wire[:end], basis, rows, out)
        if end < len(wire):
            self._parts(index)[chunk].copy_(wire[end:])

    def _basis(self, index: int) -> Basis | None:
        """Return the basis of a slot in the current step; None if there is none."""
        rows, learned = self._rows[index], self._learned.get(index)
        if rows is None or learned is None or learned.known is None or learned.key != self._key(rows):
            return None
        if learned.basis is None:
            told = learned.known[: rows.learned_bytes]
            if self.route.sends and learned.forth is None:  # of a resumed run
                learned.forth = sender_side(told, rows)
            learned.basis = Basis.read(told, rows, self.bits, learned.forth)
        return learned.basis

    def _key(self, rows: Rows) -> tuple[int, ...]:
        return *rows.key, rows.planes(self.bits)

    def _carried(self, index: int) -> int:
        """Return the bytes of the basis in each message of a slot in the current step."""
        learned = self._learned.get(index)
        if not self.training or learned is None or learned.travelling is None:
            return 0
        return len(learned.travelling) // self.chunks

    def _parts(self, index: int) -> Tensor:
        travelling = self._learned[index].travelling
        assert travelling is not None
        return travelling.view(self.chunks, -1)

    def warm_up(self, slot: Slot, chunks: int, device: torch.device) -> None:
        super().warm_up(slot, chunks, device)
        rows = self._rows_of(slot, chunks)
        if rows is not None:
            warm_up_learner(torch.zeros(slot.shape, dtype=slot.dtype, device=device), rows, self.bits, chunks)

    # The basis is known to both ends and saved by one; the moments it is learned from are state of the sender.

    def state_dict(self) -> dict[str, Tensor]:
        for learner in self._learners.values():
            learner.resolve()
        return super().state_dict()

    def shared_state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for index, learned in self._learned.items():
            learned.adopt()
            steps = torch.tensor([learned.steps, learned.left])
            state |= {f"{index}.rows": torch.tensor(learned.key), f"{index}.steps": steps}
            if learned.known is not None:
                state[f"{index}.known"] = learned.known
        return state

    def load_shared_state_dict(self, state: dict[str, Tensor]) -> None:
        before, self._learned = self._learned, {}
        for index in {int(key.partition(".")[0]) for key in state}:
            steps, left = state[f"{index}.steps"].tolist()
            learned = _Learned(tuple(state[f"{index}.rows"].tolist()), steps, left)
            known = state.get(f"{index}.known")
            if known is not None:
                learned.known = known.to(self.route.device)
                if index in before and before[index].known is learned.known:
                    learned.basis = before[index].basis  # the case in an evaluation, batch after batch
            self._learned[index] = learned


def _part(rows: Rows, chunks: int) -> int:
    """Return the bytes of the basis that each message of a step carries; the last one may be zero-padded."""
    return -(-rows.learned_bytes // chunks)
