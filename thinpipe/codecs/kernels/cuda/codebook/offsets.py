"""Memory layout of the codebook search: offsets in the counters and in the scratch memory of its launch."""

import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import MOST_PROGRAMS
from thinpipe.codecs.kernels.cuda.offsets import INTERVALS, Map

MIDDLE = tl.constexpr(8192)  # bins
COPIES = tl.constexpr(32)  # of the histogram: many values may fall into one bin
TAIL_SHIFT = tl.constexpr(15)
TAIL_BINS = 1 << (32 - TAIL_SHIFT.value)  # for all keys
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
LOST = _counters.take(1)  # set if some values of the tails could not be stored
INTERVAL_COUNTS = _counters.take(2 * INTERVALS.value, align=64)  # written by the read, not used
TAIL_COUNTS = _counters.take(TAIL_BINS, align=64)
TAIL_GREATEST = _counters.take(TAIL_BINS)
GREATEST = _counters.take(MIDDLE.value)
COUNTS = _counters.take(COPIES.value * MIDDLE.value)
COUNTERS = _counters.size

# In the scratch memory, float64, not initialised.
_scratch = Map()
EXTENTS = _scratch.take(3 * MOST_PROGRAMS.value, align=16)  # float32, as reduce_extents reads them
PARTIALS = _scratch.take(7 * MOST_PROGRAMS.value)  # per program: sums of its points, and the fields named below
CHOSEN = _scratch.take(MOST_CENTRES)  # borders
NUMBERS = _scratch.take(8)  # results that one launch passes to the next, named below
CHOICES = _scratch.take(
    MOST_BY_DYNAMIC * BORDERS.value
)  # the best start of the last cell, for every number of cells up to the limit of dynamic programming
PLACES = _scratch.take(BORDERS.value)  # of borders, among the points
PARAMETERS = _scratch.take(MOST_CENTRES)  # float32: parameters of encode_kernel
TOTALS = _scratch.take(MIDDLE.value)
POINTS = _scratch.take(MOST_POINTS.value)  # before the points: the sample, float32
POINT_SUMS = _scratch.take(4 * MOST_POINTS.value)  # prefix sums: weight, first and second moment, share of centres
TABLES = _scratch.take(INTERVALS.value * MOST_PROGRAMS.value, align=16)  # float32: one per program, for the read
KEPT = _scratch.take(0, align=16)  # float32: values of the tails

# Offsets in the partials, after four sums: values counted in the middle, values in the tails, the greatest point.
COUNTED_VALUES, TAIL_VALUES, GREATEST_POINT = (tl.constexpr(place * MOST_PROGRAMS.value) for place in (4, 5, 6))
# Offsets in the numbers: the number of points, the sum of their shares of centres, the centre that values are relative
# to, the minimum, the maximum, and whether a value is not finite.
COUNT, SHARES, CENTRE, LOW, HIGH, ODD = (tl.constexpr(place) for place in range(6))
