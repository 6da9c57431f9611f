"""Small messages between all workers: JSON and sums. Checksummed, of bounded size, and never unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from thinpipe.pipeline.activity import waiting
from thinpipe.pipeline.backend import CPU, wire_device
from thinpipe.pipeline.errors import ChecksumError, LinkError

LARGEST = 1 << 24  # bytes that one worker may make another allocate
_SUM_BYTES = 8


@contextmanager
def needing_peers(what: str) -> Iterator[None]:
    """Around calls of torch that fail when another worker is gone."""
    try:
        with waiting():
            yield
    except RuntimeError as error:
        raise LinkError(f"another worker is gone: {what} failed. Look for its first error. ({error})") from error


def gather(facts: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """What every worker has to say (JSON), on all of them. A collective."""
    device = wire_device(group, device)
    said = json.dumps(facts).encode()
    if len(said) > LARGEST:
        raise ValueError(f"workers tell each other at most {LARGEST} bytes at once, got {len(said)}")
    sizes = [int(size) for size in _all_gather(torch.tensor([len(said)]), group, device)]
    for worker, size in enumerate(sizes):
        if not 0 <= size <= LARGEST:
            raise ChecksumError(f"worker {worker} announced {size} bytes, and {LARGEST} are the most: not believed")
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    parts = _all_gather(padded, group, device)
    return [json.loads(bytes(part[:size].numpy())) for part, size in zip(parts, sizes, strict=True)]


def add_up(numbers: Tensor, group: dist.ProcessGroup | None) -> None:
    """Add up a tensor on the CPU over all workers of a group of gloo, in place and in their order. A collective."""
    parts = _all_gather(numbers, group, CPU)
    numbers.zero_()
    for part in parts:
        numbers += part


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None, device: torch.device) -> list[Tensor]:
    """A tensor of one size from every worker, each held against its checksum."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    message = torch.cat([data, _checksum(data)]).to(device)
    parts = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    with needing_peers("a word with all workers"):
        dist.all_gather(parts, message, group=group)
    tensors = []
    for worker, part in enumerate(parts):
        received, told = part.cpu().split([data.numel(), _SUM_BYTES])
        if not torch.equal(_checksum(received), told):
            raise ChecksumError(
                f"what worker {worker} told the others was changed on its way; look for errors of the network or of "
                "memory, then go on from the last checkpoint"
            )
        tensors.append(received.clone().view(tensor.dtype).view(tensor.shape))
    return tensors


def _checksum(data: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(xxhash.xxh3_64_digest(data.numpy().data)), dtype=torch.uint8)
