"""+zero for buckets: a launch of its own between finding the edges of buckets and writing codes."""

from __future__ import annotations

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.device import bucket_affine, load_bytes, store_bytes


@triton.jit
def move_to_zero_kernel(wire, scratch, PARAMETERS: tl.constexpr, BUCKETS: tl.constexpr, LEVEL_BITS: tl.constexpr):
    """Header and parameters of the bucket with values of both signs, as thinpipe.codecs.layout.move_to_zero has it.

    The last values of buckets, among the parameters, stay: they say which bucket a value is in.
    """
    levels: tl.constexpr = (1 << LEVEL_BITS) - 1
    buckets = tl.arange(0, BUCKETS)
    there = buckets < BUCKETS
    lo, hi = load_bytes(wire, buckets, there), load_bytes(wire, BUCKETS + buckets, there)
    both = (lo < 0) & (hi > 0)  # not of NaN
    low, high = tl.where(both, lo, -1.0).to(tl.float64), tl.where(both, hi, 1.0).to(tl.float64)
    step = (high - low) / levels
    exponent = (step.to(tl.int64, bitcast=True) >> 52) - 1022 - (24 - LEVEL_BITS)
    unit = ((tl.maximum(exponent, -149) + 1023) << 52).to(tl.float64, bitcast=True)
    step = tl.ceil(step / unit) * unit
    below = tl.ceil(-low / step - 0.499)
    moved_lo, moved_hi = (-below * step).to(tl.float32), ((levels - below) * step).to(tl.float32)
    moves = both & (moved_lo > float("-inf")) & (moved_hi < float("inf"))
    store_bytes(wire, buckets, moved_lo, moves)
    store_bytes(wire + 4 * BUCKETS, buckets, moved_hi, moves)
    factor, offset, scale = bucket_affine(moved_lo, moved_hi, levels)
    parameters = scratch + PARAMETERS
    tl.store(parameters + BUCKETS + buckets, factor, mask=moves)
    tl.store(parameters + 2 * BUCKETS + buckets, offset, mask=moves)
    tl.store(parameters + 3 * BUCKETS + buckets, scale, mask=moves)
