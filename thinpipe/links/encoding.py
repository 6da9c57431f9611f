"""Encodings of a link: how tensors become wires, and the state kept from message to message.

``Plain`` encodes every tensor with one codec, ``delta`` sends changes against copies of samples, ``axes`` learns a PCA
basis of the rows. Every other method with state on a link, of sent or of decoded values, is another ``Encoding``: links
depend on none of them by name.
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
    """A wire format in which the tensors of a slot may be sent."""

    codec: Codec | None  # None: their raw bytes
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
    """The schedule and size of the learned basis that a sender transmits to the other end."""

    step_bytes: int  # in a step that carries a basis
    every: int  # steps
    first_steps: int  # sent without a basis
    first_bits: int = 0  # per value in those steps


class Encoding(ABC):
    """The encoder and decoder of one link end.

    Before it is attached to a link and configured with slots, only sizes are available: ``forms``.
    """

    needs_samples = False  # True if it needs the sample indices of each training step

    def __init__(self) -> None:
        self.slots: Sequence[Slot] = ()
        self.chunks = 1  # of a step
        self.training = False  # the current step is a training step, not an evaluation
        self.seed = 0  # of stochastic rounding
        self.step = 0
        self.steps_before = 0  # steps of the run before it was resumed: stochastic rounding continues its sequence
        self._forms: list[tuple[Form, ...]] = []
        self._state: dict[int, MutableMapping[str, Tensor]] = {}  # per slot, the state of a sender's codecs

    def attach(self, route: Route) -> None:
        self.route = route

    @property
    @abstractmethod
    def spec(self) -> str:
        """The canonical spec."""

    @property
    @abstractmethod
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs in use: the first one encodes values never sent before, the last one values sent again."""

    def forms(self, slot: Slot, chunks: int = 1) -> tuple[Form, ...]:
        """Return the wire formats of a slot with ``chunks`` tensors a step: the first one, and the later one if any."""
        return (Form.of(slot, self.codecs[0]),)

    def learning(self, slot: Slot, chunks: int = 1) -> Learning:
        """Return the size and schedule of the learned basis that is sent alongside the tensors of a slot."""
        return Learning(0, 1, 0)

    def uncompressed(self, slots: Sequence[Slot], chunks: int = 1) -> str | None:
        """Return why all floats of these slots are sent uncompressed despite a codec; None if some are compressed."""
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
        """Compile the kernels for tensors of a slot, before they are timed."""
        for form in self.forms(slot, chunks):
            if form.codec is not None:
                warm_codec(form.codec, slot.shape, slot.dtype, device)

    def most_bytes(self, index: int) -> int:
        """Return the size in bytes of the largest wire of a slot."""
        return max(form.wire_bytes for form in self._forms[index])

    def form(self, chunk: int, index: int) -> Form:
        """Return the wire format of a tensor in the current step; it is the same at both ends."""
        return self._forms[index][0]

    def encode(self, chunk: int, index: int, tensor: Tensor, wire: Tensor) -> None:
        """Encode a tensor into the wire of a message that is not raw."""
        used = self.form(chunk, index).codec
        assert used is not None
        route, step = self.route, self.steps_before + self.step
        key = rounding_key(self.seed, route.source, route.target, index, step, chunk)
        used.encode(tensor, wire, state=self._state.setdefault(index, {}), key=key)

    def decode(self, chunk: int, index: int, wire: Tensor, out: Tensor) -> None:
        """Decode any wire into a tensor."""
        used = self.form(chunk, index).codec
        if used is None:
            as_bytes(out).copy_(wire)
        else:
            used.decode(wire, out)

    @abstractmethod
    def remember(self, chunk: int, index: int, value: Tensor) -> None:
        """Record the value of a tensor that was sent raw, for which encode or decode is not called."""

    def begin_step(self, step: int) -> None:
        self.step = step

    def begin_traffic(self, training: bool) -> None:
        """Begin the messages of a step. Messages of an evaluation do not change any state."""
        self.training = training

    @abstractmethod
    def begin_samples(self, samples: Tensor | None, chunks: int) -> None:
        """Set the samples of the step about to start, if the encoding needs them; None: an evaluation."""

    @abstractmethod
    def copies_bytes(self) -> int:
        """Return the bytes of the copies of all samples."""

    @abstractmethod
    def reserve_copies(self) -> None:
        """Allocate the copies now."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that only a sender has: that of its codecs, and the steps so far."""
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
        """Return the state that is identical at both ends."""

    @abstractmethod
    def load_shared_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the shared state that one of the ends has saved."""


class Plain(Encoding):
    """An encoding that sends every tensor through one codec."""

    def __init__(self, every: Codec) -> None:
        super().__init__()
        self.every = every

    @property
    def spec(self) -> str:
        return self.every.spec

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (self.every,)

    # A codec does not need sample indices, and receiving does not change its state.

    def remember(self, chunk: int, index: int, value: Tensor) -> None: ...

    def begin_samples(self, samples: Tensor | None, chunks: int) -> None: ...

    def copies_bytes(self) -> int:
        return 0

    def reserve_copies(self) -> None: ...

    def shared_state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_shared_state_dict(self, state: dict[str, Tensor]) -> None: ...


def warm_codec(codec: Codec, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Encode and decode one tensor, so that a codec compiles its kernels outside of timed code.

    It draws no random numbers of its own and does not change the counters of a link.
    """
    # Many different values: some codecs take a shortcut for constant tensors.
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device).sin_().to(dtype).view(*shape)
    codec.decode(codec.encode(x, state={}), torch.empty_like(x))
