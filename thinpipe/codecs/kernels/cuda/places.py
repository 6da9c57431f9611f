"""What order statistics keep in the counters and in the scratch memory of a launch, and where."""

from __future__ import annotations

import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import MOST_PROGRAMS
from thinpipe.codecs.kernels.cuda.memory import Map

CUTS = tl.constexpr(3)  # at a time
MOST_BUCKETS = 256
LANES = tl.constexpr(128)  # of the splitters of all cuts (brackets.py)
ALL_BINS = tl.constexpr(512)  # of the brackets of all cuts (narrow.py)
BIN_COPIES = tl.constexpr(4)  # of their counts, so that programs seldom wait for each other
ROOM = tl.constexpr(8192)  # values in a list around a cut
APART = tl.constexpr(64)  # between the lengths of two lists: all programs add to them at once
KEY_BINS = tl.constexpr(2048)  # of the keys that a cut is among (search.py)
KEY_COPIES = tl.constexpr(8)  # of their counts, so that programs that meet the same value seldom wait for each other
SUMS = tl.constexpr(16)  # partial sums of a program: counts above the lower ends of brackets; from 4, of ties
LISTS = tl.constexpr(CUTS.value * ROOM.value)  # values in all lists

# Of the numbers found for a cut, int64.
_row = Map()
LOW_KEY = _row.take(1)  # the value at the cut's rank has a key from here
HIGH_KEY = _row.take(1)  # to here
RANK = _row.take(1)  # of it among those
UP_TO = _row.take(1)  # values of the tensor below LOW_KEY; in the end, up to the found value
DONE = _row.take(1)
NEXT_KEY = _row.take(1)  # of the least value above the found one
LISTED_KEY = _row.take(1)  # of the value at the next rank, if it is in the cut's list
WORDS = tl.constexpr(8)  # from one cut's numbers to the next one's

# In the counters, int32, all zero at the launch.
_counters = Map()
ARRIVED = _counters.take(1)
FAILED = _counters.take(1)
PICKED = _counters.take(4 * CUTS.value, align=16)  # wanted bins of a cut's bracket, and the rank among their values
BELOW = _counters.take(LANES.value, align=128)  # values of the larger sample below each splitter
ABOVE = _counters.take(LANES.value)  # and above each
LENGTHS = _counters.take(CUTS.value * APART.value)  # of the lists of values in the wanted bins
BRACKET_COUNTS = _counters.take(BIN_COPIES.value * ALL_BINS.value, align=128)
HISTOGRAM = _counters.take(KEY_COPIES.value * CUTS.value * KEY_BINS.value)
COUNTERS = _counters.size

# In the scratch memory, float32, not initialised. First what is int64.
_scratch = Map()
FOUND = _scratch.take(2 * WORDS.value * CUTS.value)  # numbers found for each cut
PARTIALS = _scratch.take(2 * SUMS.value * MOST_PROGRAMS.value, align=64)  # partial sums of every program
EXTENTS = _scratch.take(3 * MOST_PROGRAMS.value)  # of every program: least, greatest, NaN if a value is not finite
SPLITTER_VALUES = _scratch.take(LANES.value)
EDGES = _scratch.take(2 * MOST_BUCKETS)  # first value of every bucket, then last value of every bucket
PARAMETERS = _scratch.take(4 * MOST_BUCKETS)  # what encode_kernel wants for every bucket
DRAWN = _scratch.take(0)  # the smaller sample; the larger one, and then the lists in its place; the kept values
