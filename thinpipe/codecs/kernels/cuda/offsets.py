"""Memory layout of order statistics: offsets in the counters and in the scratch memory of a launch."""

import triton.language as tl

from thinpipe.codecs.kernels.cuda import codes
from thinpipe.codecs.kernels.cuda.device import MOST_PROGRAMS


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


CUTS = tl.constexpr(16)  # one more than a launch finds
TARGETS = tl.constexpr(32)  # ranks to search for: two for each cut
INTERVALS = tl.constexpr(32)  # between thresholds (sample.py)
SPLITTERS = tl.constexpr(1024)  # one is not used
DRAWN_VALUES = tl.constexpr(2 * SPLITTERS.value)
COPIES = tl.constexpr(4)  # of histograms at most, to reduce contention between atomic adds
LARGE = tl.constexpr(1 << 23)  # from this size on, windows are first narrowed to one of a few bins (radix_select.py)
DENSE = tl.constexpr(128)  # bins of all windows together in this round: each bin costs counting time
ROUNDS = tl.constexpr(4)  # rounds after it; the last three resolve all 32 bits of a key
BINS = tl.constexpr(2048)  # of a window in these rounds: 11 bits
SLOTS = tl.constexpr(64)  # histograms of a round, with copies
FEW = tl.constexpr(512)  # values, at most, that are collected instead of counted in another round
LINE = tl.constexpr(32)  # values of a cache line

# In the counters, int32, all zero at the launch.
_counters = Map()
ARRIVED = _counters.take(1)
ARRIVED_SAMPLING = _counters.take(1)
FAILED = _counters.take(1)
THRESHOLDS = _counters.take(1)  # their number
INTERVAL_COUNTS = _counters.take(2 * INTERVALS.value, align=LINE.value)  # int64: values of the tensor in each interval
SAMPLE_COUNTS = _counters.take(COPIES.value * SPLITTERS.value, align=LINE.value)
DENSE_COUNTS = _counters.take(COPIES.value * DENSE.value, align=LINE.value)
HISTOGRAMS = _counters.take(ROUNDS.value * SLOTS.value * BINS.value, align=LINE.value)
# Number of collected keys of each window, one cache line each.
LISTED = _counters.take(TARGETS.value * LINE.value, align=LINE.value)
COUNTERS = tl.constexpr(_counters.size)

# In the scratch memory, float32, not initialised. The int64 fields come first.
_scratch = Map()
RANKS = _scratch.take(2 * TARGETS.value)  # of each target among the values of its window
AMOUNTS = _scratch.take(2 * TARGETS.value)  # and the number of these values
LOWS = _scratch.take(TARGETS.value)  # the first key of its window, int32
HIGHS = _scratch.take(TARGETS.value)  # and the last
EXTENTS = _scratch.take(3 * MOST_PROGRAMS.value, align=LINE.value)  # of every program (device.py)
EDGES = _scratch.take(2 * codes.MOST_BUCKETS)  # first value of every bucket, then last value of every bucket
PARAMETERS = _scratch.take(codes.PARAMETERS, align=LINE.value)
SPLITTER_VALUES = _scratch.take(SPLITTERS.value, align=LINE.value)
DRAWN = _scratch.take(DRAWN_VALUES.value, align=LINE.value)  # the smaller sample
BRACKETS = _scratch.take(4 * CUTS.value, align=LINE.value)  # low ends of all cuts, then the fields named below
TABLE = _scratch.take(2 * INTERVALS.value, align=LINE.value)  # thresholds, then uppers
# One table for every program and round (radix_select.py).
WINDOWS = _scratch.take(MOST_PROGRAMS.value * 5 * (2 + ROUNDS.value) * TARGETS.value, align=LINE.value)
HELD = _scratch.take(MOST_PROGRAMS.value * 256, align=LINE.value)  # number of values that each thread has kept
LISTS = _scratch.take(TARGETS.value * FEW.value, align=LINE.value)  # collected keys of each window, int32
KEPT = _scratch.take(0, align=LINE.value)  # the kept values
UPPERS = tl.constexpr(INTERVALS.value)  # from the thresholds to the uppers
# Offsets from the low ends of brackets: high ends; then shared values: the first one inside, and the high end.
HIGH, FIRST_SHARED, HIGH_SHARED = (tl.constexpr(place * CUTS.value) for place in (1, 2, 3))
