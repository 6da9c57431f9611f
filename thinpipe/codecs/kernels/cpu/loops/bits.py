"""Operations on the bits of 64-bit words: counting, gathering and scattering by a mask, transposition.

x86 processors since 2013 gather and scatter with one instruction (BMI2); elsewhere a loop over the bits of a mask
does the same.
"""

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from thinpipe.codecs.kernels.cpu.compiling import jit

HAS_BMI2 = bool(dict(llvmlite.binding.get_host_cpu_features()).get("bmi2"))
_WORD = ir.IntType(64)


def _call(name, count):
    """Return a function that numba compiles to a call of this function of LLVM, of ``count`` words."""

    def generate(context, builder, signature, args):
        function = builder.module.declare_intrinsic(name, (), ir.FunctionType(_WORD, [_WORD] * count))
        return builder.call(function, args)

    return types.uint64(*[types.uint64] * count), generate


@intrinsic
def ones_of(context, word):
    """Return the number of ones of a word."""
    return _call("llvm.ctpop.i64", 1)


@intrinsic
def _extract(context, word, mask):
    return _call("llvm.x86.bmi.pext.64", 2)


@intrinsic
def _deposit(context, word, mask):
    return _call("llvm.x86.bmi.pdep.64", 2)


@jit
def gather_by_loop(word, mask):
    found, place = np.uint64(0), np.uint64(0)
    while mask:
        one = mask & (np.uint64(0) - mask)
        found |= np.uint64((word & one) != np.uint64(0)) << place
        place += np.uint64(1)
        mask ^= one
    return found


@jit
def scatter_by_loop(word, mask):
    found, place = np.uint64(0), np.uint64(0)
    while mask:
        one = mask & (np.uint64(0) - mask)
        found |= one * ((word >> place) & np.uint64(1))
        place += np.uint64(1)
        mask ^= one
    return found


if HAS_BMI2:

    @jit
    def gather(word, mask):
        """Return the bits of a word at the ones of a mask, next to each other, lowest first."""
        return _extract(word, mask)

    @jit
    def scatter(word, mask):
        """Return a word with the lowest bits of another at the ones of a mask."""
        return _deposit(word, mask)

else:
    gather, scatter = gather_by_loop, scatter_by_loop


@jit
def transpose_bits(words, out):
    """Transpose bits of bytes: bit b of byte i of word 4 k + w becomes bit k of byte i of word 4 b + w, and back."""
    for w in range(4):
        a, b, c, d = words[w], words[4 + w], words[8 + w], words[12 + w]
        e, f, g, h = words[16 + w], words[20 + w], words[24 + w], words[28 + w]
        a, b = _swap(a, b, 1, 0x5555555555555555)
        c, d = _swap(c, d, 1, 0x5555555555555555)
        e, f = _swap(e, f, 1, 0x5555555555555555)
        g, h = _swap(g, h, 1, 0x5555555555555555)
        a, c = _swap(a, c, 2, 0x3333333333333333)
        b, d = _swap(b, d, 2, 0x3333333333333333)
        e, g = _swap(e, g, 2, 0x3333333333333333)
        f, h = _swap(f, h, 2, 0x3333333333333333)
        out[w], out[16 + w] = _swap(a, e, 4, 0x0F0F0F0F0F0F0F0F)
        out[4 + w], out[20 + w] = _swap(b, f, 4, 0x0F0F0F0F0F0F0F0F)
        out[8 + w], out[24 + w] = _swap(c, g, 4, 0x0F0F0F0F0F0F0F0F)
        out[12 + w], out[28 + w] = _swap(d, h, 4, 0x0F0F0F0F0F0F0F0F)


@jit
def _swap(one, other, shift, mask):
    moved = ((one >> np.uint64(shift)) ^ other) & np.uint64(mask)
    return one ^ (moved << np.uint64(shift)), other ^ moved
