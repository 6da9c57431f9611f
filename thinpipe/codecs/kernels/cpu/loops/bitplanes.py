"""Codes to bit planes and back: a plane has 8 pieces of codes; bit k of its byte i belongs to code i of piece k."""

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit


@jit
def to_planes(codes, planes):
    """Write the lowest bits of codes to all planes, lowest bits first."""
    piece = planes.shape[1]
    for bit in range(planes.shape[0]):
        plane = planes[bit]
        plane[:] = 0
        for k in range(8):
            part = codes[k * piece : (k + 1) * piece]
            for i in range(piece):
                plane[i] |= np.uint8(((part[i] >> np.uint8(bit)) & np.uint8(1)) << np.uint8(k))


@jit
def from_planes(planes, codes):
    piece = planes.shape[1]
    codes[:] = 0
    for bit in range(planes.shape[0]):
        plane = planes[bit]
        for k in range(8):
            part = codes[k * piece : (k + 1) * piece]
            for i in range(piece):
                part[i] |= np.uint8(((plane[i] >> np.uint8(k)) & np.uint8(1)) << np.uint8(bit))
