"""Small messages between workers, JSON and sums: checksummed, of bounded size, never unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from thinpipe.comm.backend import CPU, wire_device
from thinpipe.comm.control import waiting
from thinpipe.comm.errors import ChecksumError, LinkError

LARGEST = 1 << 24  # bytes: the most that one worker can make another allocate
_SUM_BYTES = 8
_TAG = 1 << 29  # of sums that are awaited; links have tags from 1 << 30 on


class DisagreementError(ValueError):
    """The workers of one pipeline were started with different settings."""


@contextmanager
def needing_peers(what: str) -> Iterator[None]:
    """Raise LinkError if calls of torch inside fail because another worker is lost."""
    try:
        with waiting():
            yield
    except ChecksumError:
        raise
    except RuntimeError as error:
        raise LinkError(f"another worker is gone: {what} failed. Look for its first error. ({error})") from error


def gather(facts: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Return the facts (JSON) of every worker, on all of them. A collective."""
    said = json.dumps(facts).encode()
    if len(said) > LARGEST:
        raise ValueError(f"workers tell each other at most {LARGEST} bytes at once, got {len(said)}")
    device = wire_device(group, device)
    sizes = [int(size) for size in _all_gather(torch.tensor([len(said)]), group, device)]
    for worker, size in enumerate(sizes):
        if not 0 <= size <= LARGEST:
            raise ChecksumError(f"worker {worker} announced {size} bytes, and {LARGEST} are the most: not believed")
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    parts = _all_gather(padded, group, device)
    return [json.loads(bytes(part[:size].numpy())) for part, size in zip(parts, sizes, strict=True)]


def agree(facts: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
    """Compare ``facts`` (JSON) with those of all workers; return the union of all facts.

    A collective: every worker of the group calls it. If two workers have different values for one name, it raises an
    error on all workers that names the workers and the values.
    """
    everyone = gather(dict(facts), group, device)
    lines = []
    for name in sorted({name for known in everyone for name in known}):
        holders: dict[str, list[int]] = {}
        for worker, known in enumerate(everyone):
            if name in known:
                holders.setdefault(json.dumps(known[name]), []).append(worker)
        if len(holders) > 1:
            lines.append(f"  {name}: " + "; ".join(f"{value} on {_workers(who)}" for value, who in holders.items()))
    if lines:
        raise DisagreementError(
            "all workers of a pipeline are started with the same settings, these differ:\n"
            + "\n".join(lines)
            + "\nStart every worker with the same code, command line and thinpipe version."
        )
    return {name: value for known in everyone for name, value in known.items()}


def add_up(numbers: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum a CPU tensor over all workers of a gloo group, in place and in the order of ranks. A collective."""
    numbers.copy_(_added(_all_gather(numbers, group, CPU)))


class Sum:
    """An all-reduce of doubles over a gloo group whose receives are posted before the numbers are known.

    gloo sends data only after the receiver has posted its receive. Here receives are posted on construction, so the
    numbers reach the others after one network delay, while a collective takes two or more.
    """

    def __init__(self, count: int, *, worker: int, workers: int, group: dist.ProcessGroup | None) -> None:
        self._worker, self._group = worker, group
        self._parts = [torch.empty(count * 8 + _SUM_BYTES, dtype=torch.uint8) for _ in range(workers)]
        self._peers = [peer for peer in range(workers) if peer != worker]
        with _needing_all():
            self._works = [dist.irecv(self._parts[peer], group=group, group_src=peer, tag=_TAG) for peer in self._peers]

    def tell(self, numbers: Sequence[float]) -> None:
        """Send the numbers of this worker; call it once."""
        data = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
        message = self._parts[self._worker] = torch.cat([data, _checksum(data)])
        with _needing_all():
            self._works += [dist.isend(message, group=self._group, group_dst=peer, tag=_TAG) for peer in self._peers]

    def heard(self) -> list[float]:
        """Wait for all workers and return the sums, added in the order of ranks."""
        with _needing_all():
            for work in self._works:
                assert work is not None  # torch returns None to workers outside the group
                work.wait()
        opened = [_opened(part, worker).view(torch.float64) for worker, part in enumerate(self._parts)]
        return _added(opened).tolist()


def tell(facts: Any, group: dist.ProcessGroup | None, peer: int, device: torch.device) -> None:
    """Send facts (JSON) to one worker, by its rank in the group; it receives them with ``hear``."""
    device = wire_device(group, device)
    said = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    with needing_peers(f"telling worker {peer}"):
        dist.send(torch.tensor([said.numel()], device=device), group=group, group_dst=peer)
        dist.send(torch.cat([said, _checksum(said)]).to(device), group=group, group_dst=peer)


def hear(group: dist.ProcessGroup | None, peer: int, device: torch.device) -> Any:
    """Receive and return the facts that one worker sends to this one."""
    device = wire_device(group, device)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    with needing_peers(f"hearing worker {peer}"):
        dist.recv(size, group=group, group_src=peer)
        if not 0 <= int(size) <= LARGEST:
            raise ChecksumError(f"worker {peer} announced {int(size)} bytes, and {LARGEST} are the most: not believed")
        message = torch.empty(int(size) + _SUM_BYTES, dtype=torch.uint8, device=device)
        dist.recv(message, group=group, group_src=peer)
    return json.loads(bytes(_opened(message, peer).numpy()))


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None, device: torch.device) -> list[Tensor]:
    """Return a tensor of the same size from every worker; verify the checksum of each."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    message = torch.cat([data, _checksum(data)]).to(device)
    parts = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    with _needing_all():
        dist.all_gather(parts, message, group=group)
    opened = [_opened(part, worker) for worker, part in enumerate(parts)]
    return [received.view(tensor.dtype).view(tensor.shape) for received in opened]


def _needing_all() -> AbstractContextManager[None]:
    return needing_peers("a word with all workers")


def _added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, added in their order."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def _opened(message: Tensor, worker: int) -> Tensor:
    """Return a message without its checksum; raise ChecksumError if that does not match."""
    received, told = message.cpu().split([message.numel() - _SUM_BYTES, _SUM_BYTES])
    if not torch.equal(_checksum(received), told):
        raise ChecksumError(
            f"what worker {worker} told the others was changed on its way; look for errors of the network or of "
            "memory, then go on from the last checkpoint"
        )
    return received.clone()


def _checksum(data: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(xxhash.xxh3_64_digest(data.numpy().data)), dtype=torch.uint8)


def _workers(who: list[int]) -> str:
    return ("worker " if len(who) == 1 else "workers ") + ", ".join(map(str, who))
