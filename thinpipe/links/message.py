"""One tensor of one chunk on its way over a link, and the checksum by which its receiver knows that it is whole.

    wire of n bytes | xxh3 of the wire, seeded with step, chunk and slot

n is known before a message arrives, unless it carries integers: they are packed in place before they leave, and gloo
takes a message that is shorter than the receive posted for it. The wire itself says then where it ends.

TCP's own checksum has 16 bits and ends where a network card or a switch computes it anew; one flipped bit in a million
messages would train another model, and nothing would say so.
"""

from __future__ import annotations

import struct
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from thinpipe.codecs.integers import INTEGERS, decode_integers, encode_integers, integer_bytes, most_integer_bytes
from thinpipe.comm.backend import capabilities_of, wire_device

CHECKSUM_BYTES = 8
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(eq=False, slots=True)
class Message:
    """Everything that one end knows about it.

    A sender makes one for each tensor it sends. A receiver has one for each chunk and slot, and keeps it from step to
    step, with its memory.
    """

    step: int
    chunk: int
    slot: int
    tensor_bytes: int = 0  # before encoding, or after decoding
    size: int = 0  # bytes of its wire; of integers, before they are packed and after they are unpacked
    raw: bool = False  # the wire is the tensor's own bytes
    integers: torch.dtype | None = None  # they are packed on the way
    # Memory that the backend reads and writes, large enough for wire and checksum. A receiver's, for its largest.
    room: Tensor = _NOTHING
    buffer: Tensor = _NOTHING  # what travels: the start of the room
    borrowed: bool = False  # the buffer is the memory of the tensor itself
    packing_ms: float = 0.0
    work: dist.Work | None = None  # under way
    pending: Future[Any] | None = None  # what a thread does for it: hand it to the network, or see it arrive
    # Of a receiver:
    on_device: Tensor | None = None  # its room on a GPU
    copied: torch.cuda.Event | None = None  # onto it
    decoded: torch.cuda.Event | None = None  # from there
    lent: Tensor | None = None  # what it was decoded into
    kept: bool = False  # to the end of the step: other tensors lie in its memory
    needed: float = 0.0  # when: seconds of this worker's clock
    usable: float = 0.0
    arrived: float | None = None  # if somebody watched


def checksum_bytes(group: dist.ProcessGroup | None, device: torch.device) -> int:
    """What a group adds to each message: nothing where wires never leave the GPUs (NCCL), where nobody hashes them."""
    return CHECKSUM_BYTES if wire_device(group, device).type == "cpu" else 0


def is_packed(dtype: torch.dtype, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether tensors of a type are sent as packed integers, of a size that the receiver does not know."""
    is_on_host = wire_device(group, device).type == "cpu"  # where they are packed, and have a checksum
    return dtype in INTEGERS and is_on_host and capabilities_of(group, device).short_receive


def most_bytes(wire_bytes: int, *, packed: bool, checksum: int) -> int:
    """The most that can travel for a wire."""
    return (most_integer_bytes(wire_bytes) if packed else wire_bytes) + checksum


def pack(message: Message) -> None:
    """Integers in the room of a message, in as few bits as they need."""
    assert message.integers is not None
    size = encode_integers(message.room[: message.size].view(message.integers), message.room)
    message.buffer = message.room[: size + CHECKSUM_BYTES]


def find_end(message: Message) -> bool:
    """Where packed integers that arrived end, by what they say themselves; False: they were changed on their way."""
    assert message.integers is not None
    size = integer_bytes(message.room, message.size // message.integers.itemsize, message.integers)
    message.buffer = message.room[: (size or 0) + CHECKSUM_BYTES]
    return size is not None


def unpack(message: Message) -> None:
    """The inverse of ``pack``, of a message that is intact."""
    assert message.integers is not None
    decode_integers(message.buffer[:-CHECKSUM_BYTES], message.room[: message.size].view(message.integers))


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
