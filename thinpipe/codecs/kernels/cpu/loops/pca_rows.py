"""Encoding of PCA components to bit planes and back (thinpipe.links.learned.transform), for a range of axes."""

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.kernels.cpu.loops.bitplanes import from_planes, to_planes

_COUNTED = 4  # up to this many bits comparing with every limit in SIMD is faster than binary search


@jit
def encode_planes(z, gains, bits, starts, limits, planes, first, last):
    rows, piece = z.shape[1], planes.shape[1]
    values = np.empty(rows, np.float32)
    codes = np.zeros(8 * piece, np.uint8)
    for axis in range(first, last):
        width = bits[axis]
        for r in range(rows):
            values[r] = z[axis, r] / gains[r]
        if width <= _COUNTED:
            codes[:rows] = 0
            for i in range((1 << width) - 1):
                limit = limits[width, i]
                for r in range(rows):
                    codes[r] += np.uint8(values[r] >= limit)
        else:
            for r in range(rows):
                code = 0
                for halving in range(width - 1, -1, -1):
                    step = 1 << halving
                    code += step * (values[r] >= limits[width, code + step - 1])
                codes[r] = code
        to_planes(codes, planes[starts[axis] : starts[axis] + width])


@jit
def decode_planes(planes, gains, bits, starts, levels, z, first, last):
    rows, piece = z.shape[1], planes.shape[1]
    codes = np.empty(8 * piece, np.uint8)
    for axis in range(first, last):
        width = bits[axis]
        from_planes(planes[starts[axis] : starts[axis] + width], codes)
        for r in range(rows):
            z[axis, r] = levels[width, codes[r]] * gains[r]
