"""What travels over a link: how tensors become wires, and what that remembers from message to message.

``Plain`` puts every tensor through one codec, ``delta`` sends changes against copies of samples, ``axes`` learns how
rows of values vary. Whatever else has a memory on a link, of what was sent or of what was decoded at both ends, is
another ``Encoding``: links know none of them by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.codecs.base import FLOATS, Codec, as_bytes
from thinpipe.codecs.rounding import rounding_key
from thinpipe.links.slot import Route, Slot

RAW_BELOW = 4096  # bytes; a smaller tensor fits in three Ethernet frames, encoding it saves nothing


@dataclass(frozen=True)
class Form:
    """One of the forms in which the tensors of a slot may travel."""

    codec: Codec | None  # None: their own bytes
    wire_bytes: int

    @property
    def raw(self) -> bool:
        return self.codec is None

    @staticmethod
    def of(slot: Slot, used: Codec) -> Form:
        size, wire_bytes = slot.tensor_bytes, used.wire_bytes(slot.shape, slot.dtype)
        raw = used.spec == "none" or slot.dtype not in FLOATS or size < RAW_BELOW or wire_bytes >= size
        return Form(None, size) if raw else Form(used, wire_bytes)


class Learning(NamedTuple):
    """What a sender tells the other end of what it has learned."""

    step_bytes: int  # in a step that has it
    every: int  # steps
    first_steps: int  # that travel without
    first_bits: int = 0  # per value in those steps


class Encoding(ABC):
    """What one end of a link does with tensors and wires.

    Before it is attached to a link and told the slots, it answers only for sizes: ``forms``.
    """

    needs_samples = False  # it is told which samples each training step has

    def __init__(self) -> None:
        self.slots: Sequence[Slot] = ()
        self.chunks = 1  # of a step
        self.training = False  # the step under way does, and is no evaluation
        self.seed = 0  # of stochastic rounding
        self.step = 0
        self.steps_before = 0  # steps of the run before the first one here: rounding goes on where it was
        self._forms: list[tuple[Form, ...]] = []
        self._state: dict[int, MutableMapping[str, Tensor]] = {}  # per slot, what codecs of a sender remember

    def attach(self, route: Route) -> None:
        self.route = route

    @property
    @abstractmethod
    def spec(self) -> str:
        """Its canonical text."""

    @property
    @abstractmethod
    def codecs(self) -> tuple[Codec, ...]:
        """Those that encode: the first one what was never sent before, the last one what was."""

    def forms(self, slot: Slot, chunks: int = 1) -> tuple[Form, ...]:
        """In which a tensor of this slot, of so many a step, may travel: the first time, and if that differs, again."""
        return (Form.of(slot, self.codecs[0]),)

    def learning(self, slot: Slot, chunks: int = 1) -> Learning:
        """What travels beside the tensors of a slot."""
        return Learning(0, 1, 0)

    def uncompressed(self, slots: Sequence[Slot], chunks: int = 1) -> str | None:
        """Return why all floats of these slots travel as they are although there is a codec; None if some do not."""
        values = [slot for slot in slots if slot.dtype.is_floating_point or slot.dtype.is_complex]
        is_codec = any(codec.spec != "none" for codec in self.codecs)
        if not values or not is_codec or any(not form.raw for slot in values for form in self.forms(slot, chunks)):
            return None
        largest = max(values, key=lambda slot: slot.tensor_bytes)
        if largest.dtype not in FLOATS:
            return f"{self.spec} encodes no {str(largest.dtype).removeprefix('torch.')}"
        if largest.tensor_bytes < RAW_BELOW:
            return (
                f"the largest tensor of a chunk has {largest.tensor_bytes} bytes, and {self.spec} encodes tensors of "
                f"{RAW_BELOW} bytes and more; fewer chunks or larger batches make larger tensors"
            )
        return f"{self.spec} would not make {largest} smaller"

    def configure(self, slots: Sequence[Slot], chunks: int = 1) -> None:
        self.slots, self.chunks = slots, chunks
        self._forms = [self.forms(slot, chunks) for slot in slots]

    def warm_up(self, slot: Slot, chunks: int, device: torch.device) -> None:
        """Compile what tensors of a slot need, before they are timed."""
        for form in self.forms(slot, chunks):
            if form.codec is not None:
                warm_codec(form.codec, slot.shape, slot.dtype, device)

    def most_bytes(self, index: int) -> int:
        """The largest wire of a slot."""
        return max(form.wire_bytes for form in self._forms[index])

    def form(self, chunk: int, index: int) -> Form:
        """How a tensor travels in the step under way: both ends find the same."""
        return self._forms[index][0]

    def encode(self, chunk: int, index: int, tensor: Tensor, wire: Tensor) -> None:
        """Fill the wire of a message that is not raw."""
        used = self.form(chunk, index).codec
        assert used is not None
        route, step = self.route, self.steps_before + self.step
        key = rounding_key(self.seed, route.source, route.target, index, step, chunk)
        used.encode(tensor, wire, state=self._state.setdefault(index, {}), key=key)

    def decode(self, chunk: int, index: int, wire: Tensor, out: Tensor) -> None:
        """Fill a tensor from any wire."""
        used = self.form(chunk, index).codec
        if used is None:
            as_bytes(out).copy_(wire)
        else:
            used.decode(wire, out)

    @abstractmethod
    def remember(self, chunk: int, index: int, value: Tensor) -> None:
        """A tensor travelled raw, so that nobody needs to encode or decode it."""

    def begin_step(self, step: int) -> None:
        self.step = step

    def begin_traffic(self, training: bool) -> None:
        """The messages of a step are about to travel. Those of an evaluation leave no trace."""
        self.training = training

    @abstractmethod
    def begin_samples(self, samples: Tensor | None, chunks: int) -> None:
        """Which samples the step has that is about to start, if that is asked for; None: an evaluation."""

    @abstractmethod
    def copies_bytes(self) -> int:
        """What it will keep of all samples."""

    @abstractmethod
    def reserve_copies(self) -> None:
        """Allocate that now."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a sender alone remembers: its codecs, and the steps so far."""
        steps = self.steps_before + self.step
        kept = {f"{slot}.{name}": value for slot, state in self._state.items() for name, value in state.items()}
        return kept | ({"steps": torch.tensor(steps)} if steps else {})

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._state = {}
        self.steps_before = int(state.get("steps", 0)) - self.step
        for key, value in state.items():
            slot, dot, name = key.partition(".")
            if dot:
                self._state.setdefault(int(slot), {})[name] = value.to(self.route.device)

    @abstractmethod
    def shared_state_dict(self) -> dict[str, Tensor]:
        """What both ends remember, the same at both."""

    @abstractmethod
    def load_shared_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what another end remembered."""


class Plain(Encoding):
    """Every tensor by itself."""

    def __init__(self, every: Codec) -> None:
        super().__init__()
        self.every = every

    @property
    def spec(self) -> str:
        return self.every.spec

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (self.every,)

    # A codec has no need of samples, and what was received leaves no trace.

    def remember(self, chunk: int, index: int, value: Tensor) -> None: ...

    def begin_samples(self, samples: Tensor | None, chunks: int) -> None: ...

    def copies_bytes(self) -> int:
        return 0

    def reserve_copies(self) -> None: ...

    def shared_state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_shared_state_dict(self, state: dict[str, Tensor]) -> None: ...


def warm_codec(codec: Codec, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Codecs compile what they need when they are first used; this is a first use that nobody times.

    It draws nothing at random of its own, and links count nothing.
    """
    # Many different values: of a constant tensor some codecs make short work.
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device).sin_().to(dtype).view(*shape)
    codec.decode(codec.encode(x, state={}), torch.empty_like(x))
