"""Hands out places in the memory of a launch, so that no two overlap and none is a sum by hand."""

from __future__ import annotations

import triton.language as tl


class Map:
    """Places one after the other: ``take(3)`` of a new map is 0, the next ``take(5, align=4)`` 4, and ``size`` then 9."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, count: int, *, align: int = 1) -> tl.constexpr:
        """Where so many values begin: behind those taken before, at a multiple of ``align``."""
        start = -(-self.size // align) * align
        self.size = start + count
        return tl.constexpr(start)
