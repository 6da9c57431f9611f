"""Steps 1 and 2 of the codebook search: locate the middle by a sample, and count middle and tails in histograms."""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codebook.offsets import (
    BATCH,
    COPIES,
    COUNTS,
    GREATEST,
    MIDDLE,
    TAIL_COUNTS,
    TAIL_GREATEST,
    TAIL_SHIFT,
    ZERO_BIN,
)
from thinpipe.codecs.kernels.cuda.counting import load_part, parts_of
from thinpipe.codecs.kernels.cuda.device import float_of, key_of, plain, sample_places
from thinpipe.codecs.kernels.cuda.offsets import INTERVALS, UPPERS

SAMPLE = tl.constexpr(4096)
TAIL = tl.constexpr(1024)  # one in TAIL values of the sample lies beyond the middle, at either end: four at most
COUNTED = tl.constexpr(1 << 18)  # values in the sample of the middle


@triton.jit
def sample_size(n):
    return tl.cast(tl.minimum(n, SAMPLE), tl.int32)


@triton.jit
def draw_sample(x, n, drawn):
    """Store this program's part of the sample."""
    size = sample_size(n)
    for start in range(tl.program_id(0) * BATCH, size, tl.num_programs(0) * BATCH):
        index = start + tl.arange(0, BATCH)
        places = sample_places(index, tl.cast(n // size, tl.int64))
        values = plain(tl.load(x + places, mask=index < size, other=0.0), False)
        tl.store(drawn + index, values, mask=index < size)


@triton.jit
def find_middle(n, drawn):
    """Return the edges of the middle, 0 in place of one that is not finite; every program computes them itself."""
    size = sample_size(n)
    lanes = tl.arange(0, SAMPLE)
    values = tl.load(drawn + lanes, mask=lanes < size, other=float("inf"), cache_modifier=".cg")
    mirrored = tl.where(lanes < size, -values, float("inf"))
    both, none = tl.join(values, mirrored), tl.full([SAMPLE, 2], float("inf"), tl.float32)
    a, b, c, d, e = tl.reduce((both, none, none, none, none), 0, _least_five)
    beyond = size // TAIL
    edges = tl.where(beyond == 0, a, tl.where(beyond == 1, b, tl.where(beyond == 2, c, tl.where(beyond == 3, d, e))))
    left, right = tl.split(tl.where(edges * 0.0 == 0.0, edges, 0.0))
    return left, -right


@triton.jit
def _least_five(a, b, c, d, e, v, w, x, y, z):
    """Return the five least of two times five rising values, in rising order."""
    a, b, c, d, e = tl.minimum(a, z), tl.minimum(b, y), tl.minimum(c, x), tl.minimum(d, w), tl.minimum(e, v)
    a, d = tl.minimum(a, d), tl.maximum(a, d)  # a sorting network
    b, e = tl.minimum(b, e), tl.maximum(b, e)
    a, c = tl.minimum(a, c), tl.maximum(a, c)
    b, d = tl.minimum(b, d), tl.maximum(b, d)
    a, b = tl.minimum(a, b), tl.maximum(a, b)
    c, e = tl.minimum(c, e), tl.maximum(c, e)
    b, c = tl.minimum(b, c), tl.maximum(b, c)
    d, e = tl.minimum(d, e), tl.maximum(d, e)
    c, d = tl.minimum(c, d), tl.maximum(c, d)
    return a, b, c, d, e


@triton.jit
def _bin_of(values, affine):
    """Return the bin of a value of the middle: (x*p - offset)*scale, as in thinpipe.codecs.layout.bucket_affine."""
    factor, offset, scale = affine
    return tl.minimum(tl.maximum((values * factor - offset) * scale, 0.0), MIDDLE - 1.0).to(tl.int32)


@triton.jit
def note_greatest(n, drawn, counters, left, right, affine):
    """Store the greatest value of the sample in every bin of the middle, which represents the bin."""
    size = sample_size(n)
    for start in range(tl.program_id(0) * BATCH, size, tl.num_programs(0) * BATCH):
        index = start + tl.arange(0, BATCH)
        values = tl.load(drawn + index, mask=index < size, other=float("nan"), cache_modifier=".cg")
        inside = (values >= left) & (values <= right)
        rising = key_of(values).to(tl.uint32, bitcast=True) ^ 0x80000000
        greatest = (counters + GREATEST).to(tl.pointer_type(tl.uint32))
        tl.atomic_max(greatest + _bin_of(values, affine), rising, mask=inside, sem="relaxed")


@triton.jit
def count_middle(x, n, counters, left, right, affine):
    """Add this program's part of a sample of the tensor to the histogram of the middle, with even bins.

    Of a small tensor the sample is all values.
    """
    size = tl.cast(tl.minimum(n, COUNTED), tl.int32)
    stride = tl.cast(n // size, tl.int64)
    counts = counters + COUNTS + (tl.program_id(0) % COPIES) * MIDDLE
    MANY: tl.constexpr = 2 * BATCH
    for start in range(tl.program_id(0) * MANY, size, tl.num_programs(0) * MANY):
        index = start + tl.arange(0, MANY)
        values = plain(tl.load(x + sample_places(index, stride), mask=index < size, other=0.0), False)
        inside = (index < size) & (values >= left) & (values <= right)
        bins = _bin_of(values, affine)
        # Half of a ReLU's values are in the first bin, where atomic adds would be serialized: sum these first.
        tl.atomic_add(counts, tl.sum((inside & (bins == 0)).to(tl.int32), axis=0), sem="relaxed")
        tl.atomic_add(counts + bins, 1, mask=inside & (bins > 0), sem="relaxed")


@triton.jit
def part_off_tails(table, left, right):
    """Store thresholds and uppers with which the read keeps the values below and above the middle."""
    lanes = tl.arange(0, INTERVALS)
    tl.store(table + lanes, tl.where(lanes == 0, float_of(key_of(left) - 1), right))
    tl.store(table + UPPERS + lanes, tl.where(lanes == 1, float("-inf"), float("inf")))
    tl.debug_barrier()


@triton.jit
def tail_place(bins):
    """Return the places of the counters of tail bins.

    4096 neighbouring bins are in as many cache lines, because most values fall into a few neighbours.
    """
    return (bins % 4096) * 32 + bins // 4096


@triton.jit
def count_tails(x, n, columns, held, counters, left, right, use_kept):
    """Add this program's values of the tails, kept or among all values, to the histogram by the bits of their keys."""
    greatest = (counters + TAIL_GREATEST).to(tl.pointer_type(tl.uint32))
    for part in range(parts_of(n, held, use_kept)):
        values, there = load_part(x, n, columns, held, part, use_kept, False)
        there &= (values < left) | (values > right)
        keys = key_of(values)
        bins = tail_place((keys >> TAIL_SHIFT) + ZERO_BIN)
        tl.atomic_add(counters + TAIL_COUNTS + bins, 1, mask=there, sem="relaxed")
        tl.atomic_max(greatest + bins, keys.to(tl.uint32, bitcast=True) ^ 0x80000000, mask=there, sem="relaxed")
