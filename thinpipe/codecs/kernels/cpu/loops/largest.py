"""Top-k selection: gathers the largest values with their positions in the tensor's order, and scatters them back."""

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.kernels.cpu.loops.values import load_keys, load_values
from thinpipe.codecs.layout import BLOCK


@jit
def count_from(x, first, last, threshold):
    """Return the numbers of magnitudes of blocks first..last that are above the threshold's key and equal to it."""
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    above, equal = 0, 0
    for b in range(first, last):
        count = min(BLOCK, x.size - b * BLOCK)
        load_keys(x, b * BLOCK, count, block, keys, True)
        more, same = np.int32(0), np.int32(0)
        for j in range(count):
            more = np.int32(more + (keys[j] > threshold))
            same = np.int32(same + (keys[j] == threshold))
        above += more
        equal += same
    return above, equal


@jit
def keep_largest(x, first, last, threshold, ties, place, values, positions, mask):
    """Write the values of blocks first..last above the threshold, and the first ``ties`` that are equal to it.

    They go to values from ``place`` on; their indices go to positions, or their bits to mask: one of the two is empty.
    """
    block = np.empty(BLOCK, np.float32)
    keys = np.empty(BLOCK, np.int32)
    kept = np.empty(BLOCK, np.uint8)
    indices = np.empty(BLOCK + 1, np.int32)
    for b in range(first, last):
        start = b * BLOCK
        count = min(BLOCK, x.size - start)
        load_keys(x, start, count, block, keys, True)
        kept[:] = 0
        for j in range(count):
            kept[j] = np.uint8(keys[j] > threshold)
        j = 0
        while ties > 0 and j < count:
            if keys[j] == threshold:
                kept[j] = 1
                ties -= 1
            j += 1
        found = 0
        for j in range(count):
            indices[found] = j
            found += kept[j]
        floats = load_values(x, start, count, block)
        for j in range(found):
            values[place + j] = floats[indices[j]]
        if positions.size:
            for j in range(found):
                positions[place + j] = start + indices[j]
        place += found
        if mask.size:
            for j in range((count + 7) // 8):
                byte = 0
                for i in range(8):
                    byte |= kept[8 * j + i] << i
                mask[start // 8 + j] = byte


@jit
def count_bits(mask, first, last):
    total = 0
    for j in range(first, last):
        byte = mask[j]
        for i in range(8):
            total += (byte >> i) & 1
    return total


@jit
def place_by_mask(mask, first, last, values, place, out):
    """Decode bytes first..last of a mask: the next value where a bit is set, zero elsewhere and after the last one."""
    indices = np.empty(BLOCK + 1, np.int32)
    for start in range(first, last, BLOCK // 8):
        stop = min(start + BLOCK // 8, last)
        found = 0
        for j in range(start, stop):
            byte = mask[j]
            for i in range(8):
                indices[found] = 8 * (j - start) + i
                found += (byte >> i) & 1
        block = out[8 * start : min(8 * stop, out.size)]
        block[:] = 0
        for i in range(min(found, values.size - place)):
            if indices[i] < block.size:
                block[indices[i]] = values[place + i]
        place = min(place + found, values.size)


@jit
def place_by_index(positions, values, out):
    """Write values to their positions; ignore positions beyond out."""
    for i in range(values.size):
        if 0 <= positions[i] < out.size:
            out[positions[i]] = values[i]
