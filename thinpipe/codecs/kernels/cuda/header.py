"""The header of the wire and the quantization parameters, computed from the edges of buckets."""

import triton
import triton.language as tl

from thinpipe.codecs.kernels.cuda.codes import FACTORS, MOST_BUCKETS, ORDINARY, PAIRS
from thinpipe.codecs.kernels.cuda.device import bucket_affine, store_bytes

LANES = tl.constexpr(MOST_BUCKETS)


@triton.jit
def write_header(wire, edges, parameters, extent, buckets, level_bits, zero):
    """Write the header and the quantization parameters, as in thinpipe.codecs.layout.bucket_affine.

    If a value is NaN or infinite, the header is NaN and all codes are 0. The last values of buckets among the
    parameters decide which bucket a value is in. Under +zero they differ from those of the header, which +zero moves.
    """
    low, high, odd = extent
    finite = odd == 0
    levels = ((1 << level_bits) - 1).to(tl.float64)
    lanes = tl.arange(0, LANES)
    there = lanes < buckets
    lo = tl.load(edges + lanes, mask=there & (lanes > 0), other=0.0, cache_modifier=".cg")
    hi = tl.load(edges + LANES + lanes, mask=lanes < buckets - 1, other=0.0, cache_modifier=".cg")
    lo = tl.where(finite, tl.where(lanes == 0, low, lo), float("nan"))
    hi = tl.where(finite, tl.where(lanes == buckets - 1, high, hi), float("nan"))
    tl.store(parameters + lanes, tl.where(finite, hi, float("inf")) + 0.0, mask=there)  # never -0, see negative
    if zero != 0:
        lo, hi = _moved_to_zero(lo, hi, level_bits, levels)
    store_bytes(wire, lanes, lo, there)
    store_bytes(wire + 4 * buckets, lanes, hi, there)
    store_bytes(wire + 8, lanes, tl.zeros([LANES], tl.float32), (lanes < 2) & (buckets == 1))  # the header's padding
    factor, offset, scale = bucket_affine(lo, hi, levels)
    tl.store(parameters + FACTORS + lanes, factor, mask=there)
    tl.store(parameters + PAIRS + 2 * lanes, tl.where(finite, offset, 0.0), mask=there)
    tl.store(parameters + PAIRS + 2 * lanes + 1, tl.where(finite, scale, 0.0), mask=there)
    tl.store(parameters + ORDINARY, tl.min(tl.where(there & (factor != 1), 0.0, 1.0), axis=0))


@triton.jit
def _moved_to_zero(lo, hi, level_bits, levels):
    """Return the ends with those of the bucket around zero moved, as in thinpipe.codecs.layout.move_to_zero."""
    both = (lo < 0) & (hi > 0)  # false for NaN
    low, high = tl.where(both, lo, -1.0).to(tl.float64), tl.where(both, hi, 1.0).to(tl.float64)
    step = (high - low) / levels
    exponent = (step.to(tl.int64, bitcast=True) >> 52) - 1022 - (24 - level_bits)
    unit = ((tl.maximum(exponent, -149) + 1023) << 52).to(tl.float64, bitcast=True)
    step = tl.ceil(step / unit) * unit
    below = tl.ceil(-low / step - 0.499)
    moved_lo, moved_hi = (-below * step).to(tl.float32), ((levels - below) * step).to(tl.float32)
    moves = both & (moved_lo > float("-inf")) & (moved_hi < float("inf"))
    return tl.where(moves, moved_lo, lo), tl.where(moves, moved_hi, hi)
