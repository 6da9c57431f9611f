"""Device functions that the kernels share: a spin barrier for all programs, order-preserving keys, sample places."""

import triton
import triton.language as tl

MOST_PROGRAMS = tl.constexpr(512)  # of a launch


@triton.constexpr_function
def bits_of(count):
    """Return the exponent of a power of two."""
    return count.bit_length() - 1


@triton.jit
def wait_for_all(counter, arrivals):
    """Wait at a spin barrier until ``arrivals`` programs have arrived; what they stored before is visible afterwards.

    All programs of the launch must run at once: the launch is a cooperative one. The L1 cache of a multiprocessor may
    still hold what was loaded before: values that change are loaded past it (``.cg``), or lie where nothing was loaded.
    """
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    # One thread polls, and with loads only: atomic adds to one place take about 27 cycles each, and polling by adding
    # would delay the programs that have yet to arrive.
    lanes = tl.arange(0, 128)
    while tl.max(tl.load(counter + 0 * lanes, mask=lanes == 0, other=0, volatile=True), axis=0) < arrivals:
        pass
    tl.debug_barrier()


@triton.jit
def lesser(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def total(parts, step, programs):
    """Return the sum of what the first ``programs`` programs stored, each ``step`` after the last."""
    lanes = tl.arange(0, MOST_PROGRAMS)
    return tl.sum(tl.load(parts + step * lanes, mask=lanes < programs, other=0, cache_modifier=".cg"), axis=0)


@triton.jit
def store_extent(extents, low, high, there):
    """Store the minimum and the maximum of this program's values, never -0; and 0, or NaN if one is not finite."""
    mine = extents + tl.program_id(0)
    tl.store(mine, tl.min(tl.where(there, low, float("inf")), axis=0) + 0.0)
    tl.store(mine + MOST_PROGRAMS, tl.max(tl.where(there, high, float("-inf")), axis=0) + 0.0)
    tl.store(mine + 2 * MOST_PROGRAMS, tl.sum(tl.where(there, low * 0.0 + high * 0.0, 0.0), axis=0))


@triton.jit
def reduce_extents(extents):
    """Return the minimum and the maximum of all programs' parts, and 0 if every value is finite, else NaN."""
    programs = tl.arange(0, MOST_PROGRAMS)
    running = programs < tl.num_programs(0)
    low = tl.min(tl.load(extents + programs, mask=running, other=float("inf"), cache_modifier=".cg"), axis=0)
    highs = tl.load(extents + MOST_PROGRAMS + programs, mask=running, other=float("-inf"), cache_modifier=".cg")
    odd = tl.load(extents + 2 * MOST_PROGRAMS + programs, mask=running, other=0.0, cache_modifier=".cg")
    return low, tl.max(highs, axis=0), tl.sum(odd, axis=0)


@triton.jit
def key_of(x):
    """Return the bits of a float32 as an int32 whose order is the order of the floats; -0 has the key of 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -0x80000000 - bits, bits)


@triton.jit
def float_of(key):
    return tl.where(key < 0, -0x80000000 - key, key).to(tl.float32, bitcast=True)


@triton.jit
def negative(x):
    """Return 1 where a float32 has its sign bit, 0 elsewhere: counting signs of differences is cheaper than comparing.

    Of two zeros a - b is -0 only if a is -0: what a value is subtracted from must not be -0.
    """
    return (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def sample_places(index, stride):
    """Return a pseudo-random place in each of many equal strata: the same ones every time."""
    mixed = index.to(tl.uint32)  # murmur3's finalizer
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    within = (mixed.to(tl.uint64) * stride.to(tl.uint64)) >> 32
    return index.to(tl.int64) * stride + within.to(tl.int64)


@triton.jit
def plain(values, MAGNITUDE: tl.constexpr):
    """Return values as float32; or their magnitudes, where NaN counts as infinity."""
    values = values.to(tl.float32)
    if MAGNITUDE:
        values = tl.where(values != values, float("inf"), tl.abs(values))
    return values


@triton.jit
def bucket_affine(lo, hi, levels):
    """Return the factor, offset and scale for values from lo to hi, as in thinpipe.codecs.layout.bucket_affine."""
    span = hi.to(tl.float64) - lo.to(tl.float64)
    factor = tl.where(span > 2.0**126, 2.0**-3, tl.where((span > 0) & (span < 2.0**-96), 2.0**100, 1.0)).to(tl.float64)
    offset = (lo.to(tl.float64) * factor).to(tl.float32)
    scale = tl.where(span > 0, levels / (span * factor), 0.0).to(tl.float32)
    return factor.to(tl.float32), offset, scale


@triton.jit
def store_bytes(wire, index, values, mask=None):
    """Store float32 values byte by byte, because a wire may start anywhere."""
    bits = values.to(tl.int32, bitcast=True)
    for byte in tl.static_range(4):
        tl.store(wire + 4 * index + byte, ((bits >> (8 * byte)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def load_bytes(wire, index, mask):
    """Load float32 values byte by byte, the inverse of store_bytes; 0 where the mask is off."""
    bits = tl.zeros(index.shape, tl.int32)
    for byte in tl.static_range(4):
        bits |= tl.load(wire + 4 * index + byte, mask=mask, other=0).to(tl.int32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)
