"""Allocation of offsets in the memory of a launch, so that fields do not overlap and no offset is computed by hand."""

from __future__ import annotations

import triton.language as tl


class Map:
    """An allocator of consecutive offsets.

    ``take(3)`` of a new map is 0, the next ``take(5, align=4)`` is 4, and ``size`` is then 9.
    """

    def __init__(self) -> None:
        self.size = 0

    def take(self, count: int, *, align: int = 1) -> tl.constexpr:
        """Return the offset of ``count`` values: after those taken before, at a multiple of ``align``."""
        start = -(-self.size // align) * align
        self.size = start + count
        return tl.constexpr(start)
