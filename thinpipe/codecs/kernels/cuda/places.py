"""What order statistics keep in the counters and in the scratch memory of a launch, and where."""

from __future__ import annotations

import triton.language as tl

from thinpipe.codecs.kernels.cuda.narrow import ROOM

CUTS = tl.constexpr(3)  # at a time
MOST_PROGRAMS = tl.constexpr(512)

# Places in the counters, int32, all zero at the launch.
ARRIVED = tl.constexpr(0)
FAILED = tl.constexpr(1)
PICKED = tl.constexpr(16)  # of every cut: the wanted bins of its bracket, and the rank among their values
BELOW = tl.constexpr(128)  # values of the larger sample below each splitter
ABOVE = tl.constexpr(256)  # and above each
LENGTHS = tl.constexpr(384)  # of the lists of values in the wanted bins
BRACKET_COUNTS = tl.constexpr(640)
HISTOGRAM = tl.constexpr(640 + 4 * 512)
COUNTERS = 640 + 4 * 512 + 8 * 3 * 2048

# Places in the scratch memory, float32, not initialised. First what is int64: numbers found for each cut, partial sums.
FOUND = tl.constexpr(0)
PARTIALS = tl.constexpr(64)
EXTENTS = tl.constexpr(64 + 2 * 16 * 512)  # of every program: least, greatest, NaN if a value is not finite
SPLITTER_VALUES = tl.constexpr(64 + 35 * 512)
EDGES = tl.constexpr(64 + 35 * 512 + 128)  # first value of every chunk, then last value of every chunk
PARAMETERS = tl.constexpr(64 + 36 * 512 + 128)  # what encode_kernel wants for every chunk
DRAWN = tl.constexpr(64 + 38 * 512 + 128)  # the smaller sample, then the larger one, then the kept values
LISTS = tl.constexpr(3 * ROOM.value)  # of values around cuts, where the larger sample was

# Places in the numbers found for a cut, int64.
WORDS = tl.constexpr(8)
LOW_KEY = tl.constexpr(0)  # the value at the cut's rank has a key from here
HIGH_KEY = tl.constexpr(1)  # to here
RANK = tl.constexpr(2)  # of it among those
UP_TO = tl.constexpr(3)  # values of the tensor below LOW_KEY; in the end, up to the found value
DONE = tl.constexpr(4)
NEXT_KEY = tl.constexpr(5)  # of the least value above the found one
LISTED_KEY = tl.constexpr(6)  # of the value at the next rank, if it is in the cut's list

SUMS = tl.constexpr(16)  # partial sums of a program: counts above the lower ends of brackets; from 4, of ties
