"""Packing of blocks of codes into bit planes and back (thinpipe.codecs.layout), and table look-up of codes."""

import numpy as np

from thinpipe.codecs.kernels.cpu.compiling import jit
from thinpipe.codecs.layout import BLOCK, PIECE, PIECES


@jit
def pack(codes, wire, piece, bits):
    """Pack one block of 8 pieces of codes into planes; overwrites the codes. See thinpipe.codecs.layout."""
    start, left = 0, bits
    while left > 0:
        width = 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        rows = width * piece
        row = wire[start : start + rows]
        if width == 8:
            for j in range(rows):
                row[j] = np.uint8(codes[j])
            if left > 8:
                for j in range(PIECES * piece):
                    codes[j] >>= 8
        elif width == 4:
            c0, c1 = codes[:rows], codes[rows : 2 * rows]
            for j in range(rows):
                row[j] = np.uint8((c0[j] & 15) | ((c1[j] & 15) << 4))
            if left > 4:
                for j in range(PIECES * piece):
                    codes[j] >>= 4
        elif width == 2:
            c0, c1, c2, c3 = (
                codes[:rows],
                codes[rows : 2 * rows],
                codes[2 * rows : 3 * rows],
                codes[3 * rows : 4 * rows],
            )
            for j in range(rows):
                row[j] = np.uint8((c0[j] & 3) | ((c1[j] & 3) << 2) | ((c2[j] & 3) << 4) | ((c3[j] & 3) << 6))
            if left > 2:
                for j in range(PIECES * piece):
                    codes[j] >>= 2
        else:
            row[:] = 0
            for i in range(PIECES):
                part = codes[i * rows : (i + 1) * rows]
                bit = np.uint8(1 << i)
                for j in range(rows):
                    row[j] |= bit if part[j] & 1 else np.uint8(0)
        start += rows
        left -= width


@jit
def unpack(wire, codes, piece, bits):
    """Unpack one block of codes: the inverse of ``pack``."""
    start, shift = 0, 0
    while shift < bits:
        left = bits - shift
        width = 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        rows = width * piece
        row = wire[start : start + rows]
        weight = np.uint16(1 << shift)
        mask = np.uint16((1 << width) - 1)
        for i in range(PIECES // width):
            part = codes[i * rows : (i + 1) * rows]
            down = np.uint16(i * width)
            if shift == 0:
                for j in range(rows):
                    part[j] = np.uint16(np.uint16(np.uint16(row[j]) >> down) & mask)
            else:
                for j in range(rows):
                    bits_here = np.uint16(np.uint16(np.uint16(row[j]) >> down) & mask)
                    part[j] = np.uint16(part[j] + np.uint16(bits_here * weight))
        start += rows
        shift += width


@jit
def look_up(wire, table, out, first, last, bits):
    """Write blocks first..last of out: each code's entry in a table of 2^bits."""
    codes = np.empty(BLOCK, np.uint16)
    for b in range(first, last):
        start = b * BLOCK
        count = min(BLOCK, out.size - start)
        piece = (count + PIECES - 1) // PIECES
        packed = wire[b * PIECE * bits : b * PIECE * bits + piece * bits]
        values = out[start : start + count]
        if bits == 8:
            for j in range(count):
                values[j] = table[packed[j]]
        else:
            unpack(packed, codes, piece, bits)
            for j in range(count):
                values[j] = table[codes[j]]
