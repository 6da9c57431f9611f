"""What order statistics keep in the counters and in the scratch memory of a launch, and where."""

from __future__ import annotations

import triton.language as tl

from thinpipe.codecs.kernels.cuda import codes
from thinpipe.codecs.kernels.cuda.device import MOST_PROGRAMS
from thinpipe.codecs.kernels.cuda.memory import Map

CUTS = tl.constexpr(16)  # one more than are found at a time
TARGETS = tl.constexpr(32)  # ranks that are searched for: of each cut two
INTERVALS = tl.constexpr(32)  # between thresholds (sample.py)
SPLITTERS = tl.constexpr(1024)  # of which one idles
COPIES = tl.constexpr(4)  # of counts of a sample, so that programs seldom wait for each other
ROUNDS = tl.constexpr(3)  # in which a key's 32 bits are found (windows.py)
BINS = tl.constexpr(2048)  # of a window: 11 bits
LINE = 32  # values of a cache line

# In the counters, int32, all zero at the launch.
_counters = Map()
ARRIVED = _counters.take(1)
ARRIVED_SAMPLING = _counters.take(1)
FAILED = _counters.take(1)
THRESHOLDS = _counters.take(1)  # how many there are
INTERVAL_COUNTS = _counters.take(2 * INTERVALS.value, align=LINE)  # int64: values of the tensor in each interval
SAMPLE_COUNTS = _counters.take(COPIES.value * SPLITTERS.value, align=LINE)
HISTOGRAMS = _counters.take(ROUNDS.value * TARGETS.value * BINS.value, align=LINE)
COUNTERS = _counters.size

# In the scratch memory, float32, not initialised. First what is int64.
_scratch = Map()
RANKS = _scratch.take(2 * TARGETS.value)  # of each target among the values of its window
LOWS = _scratch.take(TARGETS.value)  # the first key of its window, int32
HIGHS = _scratch.take(TARGETS.value)  # and the last
EXTENTS = _scratch.take(3 * MOST_PROGRAMS.value, align=LINE)  # of every program (device.py)
EDGES = _scratch.take(2 * codes.MOST_BUCKETS)  # first value of every bucket, then last value of every bucket
PARAMETERS = _scratch.take(codes.PARAMETERS, align=LINE)
SPLITTER_VALUES = _scratch.take(SPLITTERS.value, align=LINE)
DRAWN = _scratch.take(4 * SPLITTERS.value, align=LINE)  # the smaller sample
TABLE = _scratch.take(2 * INTERVALS.value, align=LINE)  # thresholds, then uppers
WINDOWS = _scratch.take(MOST_PROGRAMS.value * 3 * ROUNDS.value * TARGETS.value, align=LINE)  # of every program
HELD = _scratch.take(MOST_PROGRAMS.value * 256, align=LINE)  # of every thread: how many values it has kept
KEPT = _scratch.take(0, align=LINE)  # the kept values
UPPERS = tl.constexpr(INTERVALS.value)  # from the thresholds to the uppers
