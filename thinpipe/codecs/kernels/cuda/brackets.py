"""Where a tensor's cuts almost certainly are, from samples of it: two values around each.

1. a sample of 4096 values is ranked by counting (every value against every other): 40 of them around each cut
2. a sample of up to 524288 values is counted against those: two of the 40 enclose the cut tightly
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import load_values, negative, sample_places
from thinpipe.codecs.kernels.cuda.places import ABOVE, BELOW, CUTS, LANES

SAMPLE = tl.constexpr(4096)
SPLITTERS = tl.constexpr(40)  # around each cut; the last 8 lanes idle
DEVIATIONS = tl.constexpr(4.0)  # half a bracket's width, in standard deviations of a rank in a sample


def larger_sample(n: int) -> int:
    """Values in the larger sample of n: a multiple of 16, or what lies behind it would not be aligned."""
    return min(1 << (19 if n >= 1 << 25 else 18), n // 64 * 16)


@triton.jit
def of_cut(cut, each):
    """What belongs to a cut that is known only when the kernel runs."""
    return tl.where(cut == 0, each[0], tl.where(cut == 1, each[1], each[2]))


@triton.jit
def _places_around(rank, n, lane):
    """Where in the ranked sample the splitters of a cut are: dense where it is expected, sparse at the ends."""
    share = rank.to(tl.float64) / n
    deviation = tl.sqrt(share * (1 - share) * SAMPLE) * DEVIATIONS + 2
    middle: tl.constexpr = (SPLITTERS - 1) / 2
    side = (lane - middle) / middle
    return tl.floor(share * SAMPLE + side * tl.abs(side) * deviation).to(tl.int32)


@triton.jit
def draw(x, n, size, drawn, program, MAGNITUDE: tl.constexpr):
    """Every program draws a part of a sample."""
    MANY: tl.constexpr = 2048
    for start in range(program * MANY, size, tl.num_programs(0) * MANY):
        index = start + tl.arange(0, MANY)
        values = load_values(x, sample_places(index, tl.cast(n // size, tl.int64)), index < size, MAGNITUDE)
        tl.store(drawn + index, values, mask=index < size)


@triton.jit
def rank_sample(drawn, splitters, n, ranks):
    """Every program ranks a few values of the smaller sample and stores those that are splitters."""
    FEW: tl.constexpr = 16
    MANY: tl.constexpr = SAMPLE // 8
    lanes = tl.arange(0, LANES)
    cut = lanes // SPLITTERS
    rank = of_cut(cut, ranks)
    wanted = tl.where(cut < CUTS, _places_around(rank, n, lanes % SPLITTERS), -1)
    for start in range(tl.program_id(0) * FEW, SAMPLE, tl.num_programs(0) * FEW):
        values = tl.load(drawn + start + tl.arange(0, FEW), cache_modifier=".cg")
        less = tl.zeros([FEW, MANY], tl.int32)
        greater = tl.zeros([FEW, MANY], tl.int32)
        for other in range(0, SAMPLE, 2 * MANY):
            against0 = tl.load(drawn + other + tl.arange(0, MANY), cache_modifier=".cg")
            against1 = tl.load(drawn + other + MANY + tl.arange(0, MANY), cache_modifier=".cg")
            less += negative(against0[None, :] - values[:, None]) + negative(against1[None, :] - values[:, None])
            greater += negative(values[:, None] - against0[None, :]) + negative(values[:, None] - against1[None, :])
        before = tl.sum(less, axis=1)[:, None]
        upto = SAMPLE - tl.sum(greater, axis=1)[:, None]
        found = (before <= wanted[None, :]) & (wanted[None, :] < upto)
        tl.store(splitters + tl.broadcast_to(lanes[None, :], [FEW, LANES]), values[:, None] + tl.zeros([FEW, LANES], tl.float32), mask=found)  # fmt: skip


@triton.jit
def _any_tied(splitters):
    """Whether two neighbouring splitters of a cut are equal: then a part of all values is one value."""
    lanes = tl.arange(0, LANES)
    mine = lanes < CUTS * SPLITTERS
    values = tl.load(splitters + lanes, mask=mine, other=0.0, cache_modifier=".cg")
    following = tl.load(splitters + lanes + 1, mask=mine & (lanes % SPLITTERS < SPLITTERS - 1), cache_modifier=".cg", other=float("nan"))  # fmt: skip
    return tl.max((values == following).to(tl.int32), axis=0) > 0


@triton.jit
def count_sample(drawn, size, splitters, counters):
    """Every program counts a part of the larger sample against the splitters of all cuts."""
    if _any_tied(splitters):
        _count_part(drawn, size, splitters, counters, True)
    else:
        _count_part(drawn, size, splitters, counters, False)


@triton.jit
def _count_part(drawn, size, splitters, counters, BOTH: tl.constexpr):
    """How many values are below each splitter; BOTH: and how many above, which without ties are all the others."""
    MANY: tl.constexpr = 32
    AHEAD: tl.constexpr = 4  # loads at a time: one after the other they would take longer than the counting
    lanes = tl.arange(0, LANES)
    values = tl.load(splitters + lanes, cache_modifier=".cg") + 0.0  # never -0: signs of differences are counted
    below = tl.zeros([LANES, MANY], tl.int32)
    above = tl.zeros([LANES, MANY], tl.int32)
    for start in range(tl.program_id(0) * (MANY * AHEAD), size, tl.num_programs(0) * (MANY * AHEAD)):
        others = start + tl.arange(0, MANY)
        against0 = tl.load(drawn + others, mask=others < size, other=float("nan"), cache_modifier=".cg")
        against1 = tl.load(drawn + others + MANY, mask=others + MANY < size, other=float("nan"), cache_modifier=".cg")
        against2 = tl.load(
            drawn + others + 2 * MANY, mask=others + 2 * MANY < size, other=float("nan"), cache_modifier=".cg"
        )
        against3 = tl.load(
            drawn + others + 3 * MANY, mask=others + 3 * MANY < size, other=float("nan"), cache_modifier=".cg"
        )
        below += negative(against0[None, :] - values[:, None]) + negative(against1[None, :] - values[:, None])
        below += negative(against2[None, :] - values[:, None]) + negative(against3[None, :] - values[:, None])
        if BOTH:
            above += negative(values[:, None] - against0[None, :]) + negative(values[:, None] - against1[None, :])
            above += negative(values[:, None] - against2[None, :]) + negative(values[:, None] - against3[None, :])
    tl.atomic_add(counters + BELOW + lanes, tl.sum(below, axis=1), sem="relaxed")
    if BOTH:
        tl.atomic_add(counters + ABOVE + lanes, tl.sum(above, axis=1), sem="relaxed")


@triton.jit
def _bracket(splitters, counters, size, n, rank, CUT: tl.constexpr):
    """Two values that almost certainly enclose a cut, and whether many values are equal to one of them."""
    lanes = tl.arange(0, 64)
    mine = lanes < SPLITTERS
    places = _places_around(rank, n, lanes)
    values = tl.load(splitters + CUT * SPLITTERS + lanes, mask=mine, other=0.0, cache_modifier=".cg")
    below = tl.load(counters + BELOW + CUT * SPLITTERS + lanes, mask=mine, other=0, cache_modifier=".cg")
    above = tl.load(counters + ABOVE + CUT * SPLITTERS + lanes, mask=mine, other=0, cache_modifier=".cg")
    upto = tl.where(_any_tied(splitters), size - above, below)
    share = rank.to(tl.float64) / n
    target = share * size
    deviation = tl.sqrt(target * (1 - share)) * DEVIATIONS + 1
    real = mine & (places >= 0) & (places < SAMPLE)
    under = real & (below <= target - deviation)
    over = real & (upto >= target + deviation)
    low = tl.max(tl.where(under, values, float("-inf")), axis=0) + 0.0  # never -0: the sign of a difference counts
    high = tl.min(tl.where(over, values, float("inf")), axis=0) + 0.0
    shared = upto > below + 2
    low_shared = tl.max((shared & under & (values == low)).to(tl.int32), axis=0)
    high_shared = tl.max((shared & over & (values == high)).to(tl.int32), axis=0)
    return low, high, low_shared != 0, high_shared != 0


@triton.jit
def brackets(splitters, counters, size, n, ranks):
    """The lower ends of all cuts' brackets, the upper ends, of either the one that many values share, and how many are.

    One lower and one upper end that many values share are counted apart; 3 says that there are more, and that all are.
    """
    lo0, hi0, lo0_shared, hi0_shared = _bracket(splitters, counters, size, n, ranks[0], 0)
    lo1, hi1, lo1_shared, hi1_shared = _bracket(splitters, counters, size, n, ranks[1], 1)
    lo2, hi2, lo2_shared, hi2_shared = _bracket(splitters, counters, size, n, ranks[2], 2)
    lo_tie, lo_ties = _add_tie(lo0, 0, lo0, lo0_shared)
    lo_tie, lo_ties = _add_tie(lo_tie, lo_ties, lo1, lo1_shared)
    lo_tie, lo_ties = _add_tie(lo_tie, lo_ties, lo2, lo2_shared)
    hi_tie, hi_ties = _add_tie(hi0, 0, hi0, hi0_shared & (hi0 != lo0))
    hi_tie, hi_ties = _add_tie(hi_tie, hi_ties, hi1, hi1_shared & (hi1 != lo1))
    hi_tie, hi_ties = _add_tie(hi_tie, hi_ties, hi2, hi2_shared & (hi2 != lo2))
    ties = tl.where((lo_ties > 1) | (hi_ties > 1), 3, lo_ties + hi_ties)
    return (lo0, lo1, lo2), (hi0, hi1, hi2), (lo_tie, hi_tie), ties


@triton.jit
def _add_tie(tie, count, value, shared):
    """Take note of a value that many share: the first one is kept, a different one makes the count 2."""
    count = tl.where(shared & (count == 1) & (value != tie), 2, count)
    tie = tl.where(shared & (count == 0), value, tie)
    return tie, tl.where(shared & (count == 0), 1, count)
