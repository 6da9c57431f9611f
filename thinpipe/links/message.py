"""A message: one tensor of one chunk in transit over a link, and the checksum that protects it.

    wire of n bytes | xxh3 of the wire, seeded with step, chunk and slot

n is known before a message arrives, unless it carries integers: they are packed in place before sending, and gloo
accepts a message shorter than the posted receive. The end of the wire is then encoded in the wire itself.

TCP's own checksum has 16 bits and is recomputed by network cards and switches; one flipped bit in a million messages
would train another model without any error.
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
    """The state of one message at one end of a link.

    A sender creates one for each tensor it sends. A receiver has one for each chunk and slot, and keeps it and its
    memory from step to step.
    """

    step: int
    chunk: int
    slot: int
    tensor_bytes: int = 0  # before encoding, or after decoding
    size: int = 0  # bytes of its wire; of integers, before they are packed and after they are unpacked
    raw: bool = False  # the wire is the tensor's own bytes
    integers: torch.dtype | None = None  # dtype of integers that are packed on the wire
    # Memory that the backend reads and writes, for wire and checksum; at a receiver, for the largest ones.
    storage: Tensor = _NOTHING
    buffer: Tensor = _NOTHING  # the bytes on the wire: the first part of ``storage``
    borrowed: bool = False  # the buffer is the memory of the tensor itself
    packing_ms: float = 0.0
    work: dist.Work | None = None  # in transit
    pending: Future[Any] | None = None  # the task of a thread: start the send, or wait for the arrival
    # Of a receiver:
    on_device: Tensor | None = None  # its buffer on a GPU
    copied: torch.cuda.Event | None = None  # to ``on_device``
    decoded: torch.cuda.Event | None = None  # from ``on_device``
    lent: Tensor | None = None  # the tensor that it was decoded into
    kept: bool = False  # until the end of the step: other tensors share its memory
    needed: float = 0.0  # time at which the wire was needed, in seconds of this worker's clock
    usable: float = 0.0
    arrived: float | None = None  # only if traced


def checksum_bytes(group: dist.ProcessGroup | None, device: torch.device) -> int:
    """Return the checksum bytes per message of a group; 0 if wires stay on the GPUs (NCCL), which do not hash them."""
    return CHECKSUM_BYTES if wire_device(group, device).type == "cpu" else 0


def is_packed(dtype: torch.dtype, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return True if tensors of a dtype are sent as packed integers, of a size that the receiver does not know."""
    is_on_host = wire_device(group, device).type == "cpu"  # integers are packed, and checksums are added, on the host
    return dtype in INTEGERS and is_on_host and capabilities_of(group, device).short_receive


def max_bytes(wire_bytes: int, *, packed: bool, checksum: int) -> int:
    """Return the largest size in bytes of a message with a wire of ``wire_bytes``."""
    return (most_integer_bytes(wire_bytes) if packed else wire_bytes) + checksum


def pack(message: Message) -> None:
    """Pack the integers of a message in place, in as few bits as they need."""
    assert message.integers is not None
    size = encode_integers(message.storage[: message.size].view(message.integers), message.storage)
    message.buffer = message.storage[: size + CHECKSUM_BYTES]


def find_end(message: Message) -> bool:
    """Cut a message at the end that its packed integers encode; return False if they are corrupted."""
    assert message.integers is not None
    size = integer_bytes(message.storage, message.size // message.integers.itemsize, message.integers)
    message.buffer = message.storage[: (size or 0) + CHECKSUM_BYTES]
    return size is not None


def unpack(message: Message) -> None:
    """Unpack the integers of an intact message: the inverse of ``pack``."""
    assert message.integers is not None
    decode_integers(message.buffer[:-CHECKSUM_BYTES], message.storage[: message.size].view(message.integers))


def seal(message: Tensor, step: int, chunk: int, slot: int) -> None:
    """Write the checksum into the last bytes of a message in host memory."""
    array = message.numpy().data
    struct.pack_into("<Q", array, array.nbytes - CHECKSUM_BYTES, _checksum(array, step, chunk, slot))


def is_intact(message: Tensor, step: int, chunk: int, slot: int) -> bool:
    """Return True if the checksum of a message matches its bytes and these numbers."""
    array = message.numpy().data
    (checksum,) = struct.unpack_from("<Q", array, array.nbytes - CHECKSUM_BYTES)
    return bool(checksum == _checksum(array, step, chunk, slot))


def _checksum(array: memoryview, step: int, chunk: int, slot: int) -> int:
    # The numbers are hashed first, so that consecutive steps and chunks give unrelated seeds.
    seed = xxhash.xxh3_64_intdigest(struct.pack("<QII", step, chunk, slot))
    return xxhash.xxh3_64_intdigest(array[:-CHECKSUM_BYTES], seed)
