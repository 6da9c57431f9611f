"""The fast Walsh-Hadamard transform of many tiles at a time, vectorized."""

from thinpipe.codecs.kernels.cpu.compiling import jit


@jit
def butterflies(values, spare, tile):
    """Transform every tile, not normalized: sums and differences of pairs 1, 2, 4 ... tile/2 apart.

    Returns the array with the result, and the other one. A step reads neighbours and writes sums to the first half and
    differences to the second. This moves the lowest bit of an index to the highest, so the next step finds its pairs in
    neighbours again, and everything runs at full SIMD width, which pairs inside a SIMD register would not. Two steps
    are done at a time where possible. After a full rotation of the index bits every value is back in its position; the
    bits that select the tile are rotated without sums.
    """
    moved = 1
    while moved < values.size:
        if 4 * moved <= tile:
            _add_fours(values, spare)
            moved *= 4
        elif moved < tile:
            _add_pairs(values, spare)
            moved *= 2
        elif 4 * moved <= values.size:
            _move_fours(values, spare)
            moved *= 4
        else:
            _move_pairs(values, spare)
            moved *= 2
        values, spare = spare, values
    return values, spare


@jit
def _add_fours(x, out):
    size = x.size // 4
    out0, out1, out2, out3 = out[:size], out[size : 2 * size], out[2 * size : 3 * size], out[3 * size :]
    for j in range(size):
        a, b, c, d = x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]
        a, b, c, d = a + b, a - b, c + d, c - d
        out0[j] = a + c
        out1[j] = b + d
        out2[j] = a - c
        out3[j] = b - d


@jit
def _add_pairs(x, out):
    half = x.size // 2
    sums, differences = out[:half], out[half:]
    for j in range(half):
        a, b = x[2 * j], x[2 * j + 1]
        sums[j] = a + b
        differences[j] = a - b


@jit
def _move_fours(x, out):
    size = x.size // 4
    out0, out1, out2, out3 = out[:size], out[size : 2 * size], out[2 * size : 3 * size], out[3 * size :]
    for j in range(size):
        out0[j] = x[4 * j]
        out1[j] = x[4 * j + 1]
        out2[j] = x[4 * j + 2]
        out3[j] = x[4 * j + 3]


@jit
def _move_pairs(x, out):
    half = x.size // 2
    even, odd = out[:half], out[half:]
    for j in range(half):
        even[j] = x[2 * j]
        odd[j] = x[2 * j + 1]
