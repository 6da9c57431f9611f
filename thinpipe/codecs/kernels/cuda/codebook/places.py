"""What the search for a codebook keeps in the counters and in the scratch memory of its launch, and where."""

from __future__ import annotations

import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import MOST_PROGRAMS
from thinpipe.codecs.kernels.cuda.memory import Map
from thinpipe.codecs.kernels.cuda.places import SUMS

MIDDLE = tl.constexpr(8192)  # bins
COPIES = tl.constexpr(32)  # of their counts: half of a ReLU's values meet in one bin
TAIL_SHIFT = tl.constexpr(15)
TAIL_BINS = 1 << (32 - TAIL_SHIFT.value)  # of all keys
HALF_BIN = tl.constexpr(1 << (TAIL_SHIFT.value - 1))  # keys from the start of a bin to its middle
ZERO_BIN = tl.constexpr(TAIL_BINS // 2)  # of the key 0
GROUPS = tl.constexpr(512)
ROW = tl.constexpr(2 * GROUPS.value)  # one number for each border of groups, from 0 to GROUPS
BATCH = tl.constexpr(1024)  # values or points at a time
MOST_CENTRES = 512
MOST_BY_GROUPS = 16  # centres that start from the best borders of groups
MOST_POINTS = tl.constexpr(TAIL_BINS + MIDDLE.value + 64)

# In the counters, int32, all zero at the launch.
_counters = Map()
ARRIVED = _counters.take(1)
LOST = _counters.take(1)  # there was no room for all values of the tails
TAIL_COUNTS = _counters.take(TAIL_BINS, align=64)
TAIL_GREATEST = _counters.take(TAIL_BINS)
GREATEST = _counters.take(MIDDLE.value)
COUNTS = _counters.take(COPIES.value * MIDDLE.value)
COUNTERS = _counters.size

# In the scratch memory, float64, not initialised.
_scratch = Map()
EDGE_VALUES = _scratch.take(2)  # least and greatest value of the middle
EXTENTS = _scratch.take(3 * MOST_PROGRAMS.value, align=16)  # float32, as whole_extent reads them
PARTIALS = _scratch.take(4 * MOST_PROGRAMS.value)  # of every program: sums of its points
CENTRES = _scratch.take(MOST_CENTRES)
BORDERS = _scratch.take(MOST_CENTRES)
GROUP_SUMS = _scratch.take(3 * ROW.value)  # prefix sums at the borders of groups: weight, first and second moment
COSTS = _scratch.take(2 * ROW.value)
CHOICES = _scratch.take(MOST_BY_GROUPS * ROW.value)  # where the last cell begins at best, for every number of cells
PARAMETERS = _scratch.take(MOST_CENTRES)  # float32 from here: what encode_kernel wants
TOTALS = _scratch.take(MIDDLE.value)
POINTS = _scratch.take(MOST_POINTS.value)  # before there are points: the sample, float32
POINT_SUMS = _scratch.take(4 * MOST_POINTS.value)  # prefix sums: weight, first and second moment, share of centres
SUM_PARTIALS = _scratch.take(SUMS.value * MOST_PROGRAMS.value)  # of the read, not used
KEPT = _scratch.take(0)  # float32: values of the tails
