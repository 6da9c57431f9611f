"""Eight bytes behind every wire, by which its receiver knows that it is whole and the one it waits for.

    wire of n bytes | xxh3 of the wire, seeded with step, chunk and slot

TCP's own checksum has 16 bits and ends where a network card or a switch computes it anew; one flipped bit in a million
messages would train another model, and nothing would say so.
"""

from __future__ import annotations

import struct

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from thinpipe.workers.backend import wire_device

CHECKSUM_BYTES = 8


def checksum_bytes(group: dist.ProcessGroup | None, device: torch.device) -> int:
    """What a group adds to each message: nothing where wires never leave the GPUs (NCCL), where nobody hashes them."""
    return CHECKSUM_BYTES if wire_device(group, device).type == "cpu" else 0


def seal(message: Tensor, step: int, chunk: int, slot: int) -> None:
    """Write the checksum into the last bytes of a message in host memory."""
    array = message.numpy().data
    struct.pack_into("<Q", array, array.nbytes - CHECKSUM_BYTES, _checksum(array, step, chunk, slot))


def is_intact(message: Tensor, step: int, chunk: int, slot: int) -> bool:
    """Whether a message is what was sealed under these numbers."""
    array = message.numpy().data
    (told,) = struct.unpack_from("<Q", array, array.nbytes - CHECKSUM_BYTES)
    return bool(told == _checksum(array, step, chunk, slot))


def _checksum(array: memoryview, step: int, chunk: int, slot: int) -> int:
    # The numbers are hashed first: steps and chunks that follow each other give seeds that have nothing in common.
    seed = xxhash.xxh3_64_intdigest(struct.pack("<QII", step, chunk, slot))
    return xxhash.xxh3_64_intdigest(array[:-CHECKSUM_BYTES], seed)
