"""What the search for a codebook keeps in the counters and in the scratch memory of its launch, and where."""

from __future__ import annotations

import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import MOST_PROGRAMS
from thinpipe.codecs.kernels.cuda.memory import Map
from thinpipe.codecs.kernels.cuda.places import INTERVALS

MIDDLE = tl.constexpr(8192)  # bins
COPIES = tl.constexpr(32)  # of their counts: many values may meet in one bin
TAIL_SHIFT = tl.constexpr(15)
TAIL_BINS = 1 << (32 - TAIL_SHIFT.value)  # of all keys
HALF_BIN = tl.constexpr(1 << (TAIL_SHIFT.value - 1))  # keys from the start of a bin to its middle
ZERO_BIN = tl.constexpr(TAIL_BINS // 2)  # of the key 0
BORDERS = tl.constexpr(64)  # candidates for borders between cells: a power of two
BATCH = tl.constexpr(1024)  # values at a time
SEVERAL = tl.constexpr(128)  # points at a time: a program seldom has more
MOST_CENTRES = 512
MOST_BY_DYNAMIC = 16  # centres that start from the best borders
MOST_POINTS = tl.constexpr(TAIL_BINS + MIDDLE.value + 64)

# In the counters, int32, all zero at the launch.
_counters = Map()
ARRIVED = _counters.take(1)
LOST = _counters.take(1)  # there was no room for all values of the tails
INTERVAL_COUNTS = _counters.take(2 * INTERVALS.value, align=64)  # of the read, not used
TAIL_COUNTS = _counters.take(TAIL_BINS, align=64)
TAIL_GREATEST = _counters.take(TAIL_BINS)
GREATEST = _counters.take(MIDDLE.value)
COUNTS = _counters.take(COPIES.value * MIDDLE.value)
COUNTERS = _counters.size

# In the scratch memory, float64, not initialised.
_scratch = Map()
EXTENTS = _scratch.take(3 * MOST_PROGRAMS.value, align=16)  # float32, as whole_extent reads them
PARTIALS = _scratch.take(7 * MOST_PROGRAMS.value)  # of every program: sums of its points, and what is named below
CHOSEN = _scratch.take(MOST_CENTRES)  # borders
NUMBERS = _scratch.take(8)  # what one launch tells the next, below
CHOICES = _scratch.take(
    MOST_BY_DYNAMIC * BORDERS.value
)  # where the last cell begins at best, for every number of cells
PLACES = _scratch.take(BORDERS.value)  # of borders, among the points
PARAMETERS = _scratch.take(MOST_CENTRES)  # float32 from here: what encode_kernel wants
TOTALS = _scratch.take(MIDDLE.value)
POINTS = _scratch.take(MOST_POINTS.value)  # before there are points: the sample, float32
POINT_SUMS = _scratch.take(4 * MOST_POINTS.value)  # prefix sums: weight, first and second moment, share of centres
TABLES = _scratch.take(INTERVALS.value * MOST_PROGRAMS.value, align=16)  # float32: each program's, for the read
KEPT = _scratch.take(0, align=16)  # float32: values of the tails

# Among the partials, behind four sums: values counted in the middle, values in the tails, the greatest point.
COUNTED_VALUES, TAIL_VALUES, GREATEST_POINT = (tl.constexpr(place * MOST_PROGRAMS.value) for place in (4, 5, 6))
# Among the numbers: how many points there are, all of their shares of centres, what values are about, and the extent.
COUNT, SHARES, CENTRE, LOW, HIGH, ODD = (tl.constexpr(place) for place in range(6))
