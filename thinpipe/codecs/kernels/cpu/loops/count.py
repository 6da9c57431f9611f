"""Loops that read a tensor once: extent, random sample, counts below bounds, histogram, and gathering of keys."""

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.kernels.cpu.loops.values import load_keys, load_values
from thinpipe.codecs.layout import BLOCK


@jit
def extent_of_blocks(x, first, last):
    """Return the least and the greatest key of blocks first..last."""
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        load_keys(x, b * BLOCK, count, block, keys, False)
        for j in range(count):
            low = min(low, keys[j])
            high = max(high, keys[j])
    return low, high


@jit
def sample_keys(x, first, last, stride, magnitude, out):
    """Write a key from a random position of each stride first..last, which depends on the stride's index only."""
    picked = np.empty(BLOCK, x.dtype)
    block = np.empty(BLOCK, np.float32)
    for start in range(first, last, BLOCK):
        count = min(BLOCK, last - start)
        for j in range(count):
            mixed = np.uint32(start + j)  # MurmurHash3 finalizer: a hash, so that threads share no state
            mixed = np.uint32((mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B))
            mixed = np.uint32((mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35))
            place = np.int64((np.uint64(mixed ^ (mixed >> np.uint32(16))) * np.uint64(stride)) >> np.uint64(32))
            picked[j] = x[(start + j) * stride + place]
        load_keys(picked, 0, count, block, out[start : start + count], magnitude)


@jit
def _append(keys, chosen, gathered, found):
    """Append the chosen keys of a block to the ``found`` ones; return the new count, or -1 on overflow.

    Processes groups of 8 keys, skips groups without a chosen key, and has no branch that would be mispredicted: a key
    is always written and the count advances only if it is chosen, so the last entry of ``gathered`` is never used.
    """
    groups = chosen.view(np.uint64)
    filled = np.empty(groups.size, np.int32)
    some = 0
    for w in range(groups.size):
        filled[some] = w
        some += groups[w] != 0
    if found + 8 * some >= gathered.size:
        total = 0
        for j in range(chosen.size):
            total += chosen[j]
        if found < 0 or found + total >= gathered.size:
            return -1
    for w in range(some):
        for j in range(8 * filled[w], 8 * filled[w] + 8):
            gathered[found] = keys[j]
            found += chosen[j]
    return found


@jit
def count_and_gather(x, first, last, magnitude, bounds, regions, below, gathered):
    """Read blocks first..last once: count the keys below each bound, and gather the keys in the regions.

    regions[i] = (a, b) means a <= key < b. Returns the least and greatest key and the number of gathered keys, or -1
    if they do not fit. Example: keys 5 1 7 3, bounds [4], region [3, 6): below [2], gathered 5 3.
    """
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    inside = np.empty(BLOCK, np.uint8)
    found = 0
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        load_keys(x, b * BLOCK, count, block, keys, magnitude)
        for j in range(count):
            low = min(low, keys[j])
            high = max(high, keys[j])
        for i in range(bounds.size):
            bound = bounds[i]
            less = np.int32(0)
            for j in range(count):
                less = np.int32(less + (keys[j] < bound))
            below[i] += less
        if regions.shape[0] == 0 or found < 0:
            continue
        inside[:] = 0
        for i in range(regions.shape[0]):
            start, stop = regions[i, 0], regions[i, 1]
            for j in range(count):
                inside[j] |= np.uint8((keys[j] >= start) & (keys[j] < stop))
        found = _append(keys, inside, gathered, found)
    return low, high, found


@jit
def histogram(x, first, last, left, right, p, offset, scale, counts, gathered):
    """Read blocks first..last once: histogram of equal bins between two keys, and gather the keys beyond them.

    The bin is (x*p - offset)*scale; the last bin counts the keys beyond. counts has two rows, for even and odd
    positions: with one row, consecutive equal values, as a ReLU makes them, would each wait for the previous add.
    Returns the same as count_and_gather.
    """
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    bins = np.empty(BLOCK, np.int32)
    outside = np.empty(BLOCK, np.uint8)
    even, odd = counts[0], counts[1]
    top = np.float32(even.size - 2)
    found = 0
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        load_keys(x, b * BLOCK, count, block, keys, False)
        values = load_values(x, b * BLOCK, count, block)
        for j in range(count):
            low = min(low, keys[j])
            high = max(high, keys[j])
        for j in range(count):
            place = (values[j] * p - offset) * scale
            place = place if place > np.float32(0) else np.float32(0)  # NaN too
            bins[j] = np.int32(place if place < top else top)
        outside[count:] = 0
        for j in range(count):
            outside[j] = np.uint8((keys[j] < left) | (keys[j] > right))
        for j in range(count):
            bins[j] = even.size - 1 if outside[j] else bins[j]
        for j in range(count // 2):
            even[bins[2 * j]] += np.uint32(1)
            odd[bins[2 * j + 1]] += np.uint32(1)
        if count % 2:
            even[bins[count - 1]] += np.uint32(1)
        found = _append(keys, outside, gathered, found)
    return low, high, found
