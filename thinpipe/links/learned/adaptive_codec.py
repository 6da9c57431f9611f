"""auto:A-B on a link: the codecs of the presets of A to B bits, among which both ends switch between steps.

A level is a preset: 8 stands for ``8bit``. Levels whose preset has ``axes`` share one PCA basis, which is learned at
all levels, with an allocation of bits for each; until the first basis is known they use the codec of the most bits.
``level`` is the highest one until it is set, at both ends before the same step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from thinpipe.codecs.base import Codec
from thinpipe.codecs.normal import MAX_BITS
from thinpipe.codecs.recipes import ADAPTIVE, ADAPTIVE_RANGE, FOR_GRADIENTS, RECIPES
from thinpipe.codecs.spec import codec, needs_link
from thinpipe.links.learned.pca_codec import FIRST, PCACodec
from thinpipe.links.learned.row_layout import Rows
from thinpipe.links.learned.transform import Basis
from thinpipe.links.link_codec import BasisSchedule, WireFormat, warm_codec
from thinpipe.links.slot import Slot

LEVELS = tuple(int(name.removesuffix("bit")) for name in RECIPES)  # bits per value, most first


class AdaptiveCodec(PCACodec):
    """A link codec of several levels of bits per value, for activations or for gradients."""

    def __init__(self, fewest: int, most: int, *, gradients: bool = False) -> None:
        if not (fewest in LEVELS and most in LEVELS and fewest < most):
            raise ValueError(f"{fewest}-{most} is no range from fewer to more of {', '.join(map(str, LEVELS))} bits")
        self.levels = tuple(level for level in LEVELS if fewest <= level <= most)
        self.level = self.first_level = most
        self._gradients = gradients
        self._codecs: dict[int, Codec] = {}  # by level
        self._bits: dict[int, float] = {}  # per value in the basis, of the other levels
        for level in self.levels:
            spec = RECIPES[f"{level}bit"][gradients]
            if needs_link(spec):
                self._bits[level] = float(spec.removeprefix("axes:"))
            else:
                self._codecs[level] = codec(spec)
        # The layout of the basis and the interval of its updates follow from the fewest bits: its share is largest.
        super().__init__(*(sorted(self._bits.values()) or [MAX_BITS]), first=self._codecs.get(most, FIRST))

    @classmethod
    def parse(cls, spec: str) -> AdaptiveCodec:
        found = re.fullmatch(rf"{ADAPTIVE}:(\d+)-(\d+)({re.escape(FOR_GRADIENTS)})?", spec)
        try:
            if found is None:
                raise ValueError("it has no range")
            return cls(int(found[1]), int(found[2]), gradients=bool(found[3]))
        except ValueError as error:
            raise ValueError(
                f"{spec!r} makes no sense: {error}; {ADAPTIVE} takes the fewest and the most bits per value, as in "
                f"{ADAPTIVE_RANGE}"
            ) from None

    @property
    def spec(self) -> str:
        return f"{ADAPTIVE}:{self.levels[-1]}-{self.levels[0]}{FOR_GRADIENTS * self._gradients}"

    @property
    def immediate_spec(self) -> str:
        return self.spec

    def check_direction(self, direction: str) -> None:
        if self._gradients != (direction == "backward"):
            kind = "gradients" if self._gradients else "activations"
            raise ValueError(f"{self.spec} is for {kind}: give {ADAPTIVE_RANGE} for both directions")

    # Sizes

    def wire_formats(self, slot: Slot, chunks: int = 1) -> tuple[WireFormat, ...]:
        """Return the largest format: that of the most bits."""
        return (WireFormat.of(slot, self.codecs[0]),)

    def level_bytes(self, slots: Sequence[Slot], chunks: int = 1) -> tuple[int, ...]:
        return tuple(sum(self._format(slot, chunks, level).wire_bytes for slot in slots) for level in self.levels)

    def basis_schedule(self, slot: Slot, chunks: int = 1) -> BasisSchedule:
        return super().basis_schedule(slot, chunks)._replace(first_steps=0, first_bits=0)

    def warm_up(self, slot: Slot, chunks: int, device: torch.device) -> None:
        super().warm_up(slot, chunks, device)
        for each in self._codecs.values():
            if not WireFormat.of(slot, each).raw:
                warm_codec(each, slot.shape, slot.dtype, device)

    def _rows_of(self, slot: Slot, chunks: int) -> Rows | None:
        return super()._rows_of(slot, chunks) if self._bits else None

    def _format(self, slot: Slot, chunks: int, level: int) -> WireFormat:
        """Return the format of a slot at a level, once a basis is known."""
        first, rows = WireFormat.of(slot, self.codecs[0]), self._rows_of(slot, chunks)
        if level in self._bits:
            return first if rows is None else WireFormat(rows.wire_bytes(self._bits[level]), None, False)
        found = WireFormat.of(slot, self._codecs[level])
        return first if found.raw else found

    def _plain_format(self, chunk: int, index: int) -> WireFormat:
        level = self._level_of(chunk)
        if level in self._bits and self._basis_of(chunk, index) is None:
            return self._formats[index][0]
        return self._by_level[index][level]

    def configure(self, slots: Sequence[Slot], chunks: int = 1) -> None:
        super().configure(slots, chunks)
        self._by_level = [{level: self._format(slot, chunks, level) for level in self.levels} for slot in slots]

    def max_bytes(self, index: int) -> int:
        first, largest = self._formats[index][0], max(each.wire_bytes for each in self._by_level[index].values())
        return super().max_bytes(index) + max(0, largest - first.wire_bytes)

    # A step

    def _level_of(self, chunk: int) -> int:
        return self.level if chunk else self.first_level

    def _basis_of(self, chunk: int, index: int) -> Basis | None:
        bits = self._bits.get(self._level_of(chunk))
        return None if bits is None else self._basis(index, bits)
