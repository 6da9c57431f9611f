"""Integers without loss: every type and range, in the bytes that their range needs, and invalid wires."""

import numpy as np
import pytest
import torch

from thinpipe.codecs.integers import INTEGERS, decode_integers, encode_integers, integer_bytes, most_integer_bytes
from thinpipe.codecs.layout import BLOCK, packed_bytes

COUNTS = [1, 2, 7, 8, 9, 100, BLOCK - 1, BLOCK, 3 * BLOCK + 100]


def integers(low: int, high: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values from low to high, both among them if there is room for both."""
    name = "bool" if dtype == torch.bool else str(dtype).removeprefix("torch.")
    wide = np.uint64 if dtype == torch.uint64 else np.int64
    values = np.random.default_rng(0).integers(low, high, count, dtype=wide, endpoint=True)
    values[0], values[-1] = low, high if count > 1 else low
    return torch.from_numpy(values.astype(name))


def there_and_back(x: torch.Tensor) -> int:
    """The size of the wire, once all that is promised of it holds; packed and unpacked where the tensor was, too."""
    most, own = most_integer_bytes(x.nbytes), x.nbytes
    wire = torch.full((most,), 0xAA, dtype=torch.uint8)
    size = encode_integers(x, wire)
    assert size <= most
    # What lies behind a wire, of another step, is nothing to it.
    assert integer_bytes(wire, x.numel(), x.dtype) == size
    out = torch.empty_like(x)
    decode_integers(wire[:size], out)
    assert torch.equal(out, x)
    room = torch.zeros(most + 3, dtype=torch.uint8)
    room[:own] = x.reshape(-1).view(torch.uint8)
    assert encode_integers(room[:own].view(x.dtype), room) == size
    assert torch.equal(room[:size], wire[:size])
    decode_integers(room[:size], room[:own].view(x.dtype))
    assert torch.equal(room[:own].view(x.dtype).view(x.shape), x)
    return size


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_every_range_of_every_type(dtype):
    info = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
    least, largest = (0, 1) if dtype == torch.bool else (info.min, info.max)
    for bits in range((largest - least).bit_length() + 1):
        span = (1 << bits) - 1
        for low in {least, largest - span, (least + largest - span) // 2}:
            for count in COUNTS if bits < 3 else (9, 100):
                x = integers(low, low + span, count, dtype)
                needed = 1 + x.itemsize + packed_bytes(count, bits if count > 1 else 0)
                assert there_and_back(x) == min(needed, most_integer_bytes(x.nbytes)), (bits, low, count)


def test_bytes_of_a_mask():
    mask = torch.ones(8, 512, dtype=torch.int64)
    assert there_and_back(mask) == 9
    assert there_and_back(mask.bool()) == 2
    mask[3, 100:] = 0
    assert there_and_back(mask) == 9 + 8 * 512 // 8
    assert there_and_back(mask.bool()) == 2 + 8 * 512 // 8


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)])
def test_shapes(shape):
    there_and_back(torch.randint(-(2**62), 2**62, shape))


@pytest.mark.parametrize("count", [1, 3, 8, 100])
def test_an_invalid_wire_has_no_size(count):
    most = most_integer_bytes(8 * count)
    for first in range(256):
        wire = torch.zeros(most, dtype=torch.uint8)
        wire[0] = first
        size = integer_bytes(wire, count, torch.int64)
        sensible = 9 + packed_bytes(count, first) if first <= 64 else 8 * count + 1 if first == 255 else most + 1
        assert size == (sensible if sensible <= most else None)
        if size is not None:
            decode_integers(wire[:size], torch.empty(count, dtype=torch.int64))
