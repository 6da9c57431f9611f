"""Link codecs: the one interface for all that encodes the tensors of a link.

``CodecAdapter`` encodes every tensor with one codec, ``activation_cache`` every sample, and ``learned`` rows in a PCA
basis. A further method is one more subclass of ``LinkCodec`` and an entry in ``registry``; links know none by name.

    before the first step   configure, with the slots; sizes of all messages follow: wire_formats, basis_schedule
    a step                  begin_step, then for each message wire_format and encode or decode
    between steps           state_dict, load_state_dict
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.codecs.base import FLOATS, Codec, as_bytes
from thinpipe.codecs.rounding import rounding_key
from thinpipe.links.slot import Route, Slot

RAW_BELOW = 4096  # bytes; a smaller tensor fits in three Ethernet frames, encoding it saves nothing


class WireFormat(NamedTuple):
    """A format in which the tensors of a slot may be sent."""

    wire_bytes: int
    codec: Codec | None  # None: raw bytes, or an encoding of the link codec itself
    raw: bool

    @staticmethod
    def of(slot: Slot, codec: Codec | None) -> WireFormat:
        """Return the format of a slot's tensors that are encoded if that makes them smaller; None: always raw."""
        size = slot.tensor_bytes
        if codec is None or codec.spec == "none" or slot.dtype not in FLOATS or size < RAW_BELOW:
            return WireFormat(size, None, True)
        wire_bytes = codec.wire_bytes(slot.shape, slot.dtype)
        return WireFormat(wire_bytes, codec, False) if wire_bytes < size else WireFormat(size, None, True)


class BasisSchedule(NamedTuple):
    """The size of a learned basis, and the steps in which a sender transmits it to the other end."""

    step_bytes: int = 0  # in a step that carries a basis
    every: int = 1  # steps
    first_steps: int = 0  # sent without a basis
    first_bits: int = 0  # per value in those steps


class LinkCodec(ABC):
    """The encoder or decoder of one link end. Both ends make the same choices from shapes and steps alone.

    Before it is attached to a link and configured with slots, only specs, sizes and ``warm_up`` are available.
    """

    needs_basis = False  # True if decoding needs a basis that is learned in training
    # Bits per value that it can encode with, most first; both ends may set another level between two steps.
    levels: tuple[int, ...] = ()
    level = first_level = 0  # of all chunks of a step but the first, and of the first

    def __init__(self, *codecs: Codec) -> None:
        self.codecs = codecs  # the first one encodes tensors before anything is learned
        self.slots: Sequence[Slot] = ()
        self.chunks = 1  # of a step
        self.training = False  # the current step is a training step, not an evaluation
        self.seed = 0  # of stochastic rounding
        self.step = 0
        self.steps_before = 0  # steps of the run before it was resumed: stochastic rounding continues its sequence
        self._formats: list[tuple[WireFormat, ...]] = []  # by slot
        self._state: dict[int, MutableMapping[str, Tensor]] = {}  # by slot, the state of a sender's codecs

    # The spec

    @classmethod
    def parse(cls, spec: str) -> LinkCodec:
        """Return the link codec of a spec."""
        raise ValueError(f"{spec!r} makes no sense: {cls.__name__} does not define parse")

    @property
    @abstractmethod
    def spec(self) -> str:
        """The canonical spec, from which other workers create the same link codec."""

    @property
    def stateless_codec(self) -> Codec | None:
        """The codec that encodes every tensor by itself; None if both ends keep state, which needs training."""
        return None

    @property
    def immediate_spec(self) -> str:
        """The spec for speed measurements, where accuracy does not matter: without the first steps of training."""
        return self.spec

    def check_direction(self, direction: str) -> None:  # noqa: B027
        """Raise ValueError if it cannot encode the tensors of links ``"forward"`` or ``"backward"``."""

    # Sizes

    def wire_formats(self, slot: Slot, chunks: int = 1) -> tuple[WireFormat, ...]:
        """Return the formats of a slot with ``chunks`` tensors a step: the first one, and the later one if any."""
        return (WireFormat.of(slot, self.codecs[0]),)

    def basis_schedule(self, slot: Slot, chunks: int = 1) -> BasisSchedule:
        return BasisSchedule()

    def level_bytes(self, slots: Sequence[Slot], chunks: int = 1) -> tuple[int, ...]:
        """Return the bytes of one chunk's wires at each of ``levels``, without those of a basis."""
        return ()

    def why_uncompressed(self, slots: Sequence[Slot], chunks: int = 1) -> str | None:
        """Return why all floats of these slots are sent uncompressed despite a codec; None if some are compressed."""
        values = [slot for slot in slots if slot.dtype.is_floating_point or slot.dtype.is_complex]
        formats = [each for slot in values for each in self.wire_formats(slot, chunks)]
        if not formats or not all(each.raw for each in formats) or all(codec.spec == "none" for codec in self.codecs):
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

    def warm_up(self, slot: Slot, chunks: int, device: torch.device) -> None:
        """Compile the kernels for tensors of a slot, before they are timed."""
        for each in self.wire_formats(slot, chunks):
            if each.codec is not None:
                warm_codec(each.codec, slot.shape, slot.dtype, device)

    # Set-up

    def attach(self, route: Route) -> None:
        self.route = route

    def configure(self, slots: Sequence[Slot], chunks: int = 1) -> None:
        self.slots, self.chunks = slots, chunks
        self._formats = [self.wire_formats(slot, chunks) for slot in slots]

    def reserve(self) -> None:  # noqa: B027
        """Allocate memory that grows with the number of samples now, not in the first step."""

    def max_bytes(self, index: int) -> int:
        """Return the size in bytes of the largest wire of a slot."""
        return max(each.wire_bytes for each in self._formats[index])

    # A step

    def begin_step(self, step: int, training: bool) -> None:
        """Begin the messages of a step; those of an evaluation change no state."""
        self.step, self.training = step, training

    def wire_format(self, chunk: int, index: int) -> WireFormat:
        """Return the format of a tensor in the current step; it is the same at both ends."""
        return self._formats[index][0]

    def encode(self, chunk: int, index: int, tensor: Tensor, wire: Tensor) -> None:
        """Encode a tensor into the wire of a message that is not raw."""
        codec = self.wire_format(chunk, index).codec
        assert codec is not None
        step = self.steps_before + self.step
        key = rounding_key(self.seed, self.route.source, self.route.target, index, step, chunk)
        codec.encode(tensor, wire, state=self._state.setdefault(index, {}), key=key)

    def decode(self, chunk: int, index: int, wire: Tensor, out: Tensor) -> None:
        """Decode any wire into a tensor."""
        codec = self.wire_format(chunk, index).codec
        if codec is None:
            as_bytes(out).copy_(wire)
        else:
            codec.decode(wire, out)

    def observe_raw(self, chunk: int, index: int, value: Tensor) -> None:  # noqa: B027
        """Observe a tensor that was sent raw, for which encode or decode is not called."""

    # State

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that only a sender has: that of its codecs, and the steps so far."""
        steps = self.steps_before + self.step
        state = {f"{slot}.{name}": value for slot, each in self._state.items() for name, value in each.items()}
        return state | ({"steps": torch.tensor(steps)} if steps else {})

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._state = {}
        self.steps_before = int(state.get("steps", 0)) - self.step
        for key, value in state.items():
            slot, dot, name = key.partition(".")
            if dot:
                self._state.setdefault(int(slot), {})[name] = value.to(self.route.device)

    def shared_state_dict(self) -> dict[str, Tensor]:
        """Return the state that is identical at both ends."""
        return {}

    def load_shared_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Load the shared state that one of the ends has saved."""


class CodecAdapter(LinkCodec):
    """A codec as a link codec: it encodes every tensor."""

    @property
    def spec(self) -> str:
        return self.codecs[0].spec

    @property
    def stateless_codec(self) -> Codec:
        return self.codecs[0]


def warm_codec(codec: Codec, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Encode and decode one tensor, so that a codec compiles its kernels outside of timed code.

    It draws no random numbers of its own and does not change the counters of a link.
    """
    # Many different values: some codecs take a shortcut for constant tensors.
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device).sin_().to(dtype).view(*shape)
    codec.decode(codec.encode(x, state={}), torch.empty_like(x))
