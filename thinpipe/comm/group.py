"""A group of workers: collectives of small messages, messages to one worker, and streams of bytes.

    statistics of a step      ``sum``, and ``expect_sum``, whose receives are posted before the numbers are known
    JSON                      ``gather``, ``agree``, ``send_json``, ``receive_json``
    tensors                   ``send``, ``receive``, ``isend``, ``irecv``
    streams of bytes          ``send_pieces``, ``receive_pieces``

JSON and sums are checksummed, of bounded size, and never unpickled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from thinpipe.comm.backend import CPU, wire_device
from thinpipe.comm.control import waiting
from thinpipe.comm.errors import ChecksumError, LinkError
from thinpipe.comm.streams import PIECE, HashedPieces, in_pieces

__all__ = ["DisagreementError", "Group", "P2POp", "PendingSum", "ProcessGroup", "Work", "link_errors"]

LARGEST = 1 << 24  # bytes: the most that one worker can make another allocate
_CHECKSUM_BYTES = 8
# Links use tags from 1 << 30 on, users small ones; 1 << 29 is that of sums in training, and of the ring in generation.
_SUM_TAG = 1 << 29
_PING_TAG = _SUM_TAG + 2
FILE_TAG = _SUM_TAG + 1  # of model files, which a thread sends while the main thread uses the group


class DisagreementError(ValueError):
    """The workers of one pipeline were started with different settings."""


@contextmanager
def link_errors(action: str) -> Iterator[None]:
    """Raise LinkError if calls of torch inside fail because another worker is lost."""
    try:
        with waiting():
            yield
    except RuntimeError as error:
        raise LinkError(f"another worker is gone: {action} failed. Look for its first error. ({error})") from error


@dataclass(frozen=True)
class Group:
    """One worker's view of a process group; a peer is given by its rank in the group."""

    rank: int
    size: int
    process_group: ProcessGroup | None = None  # None: the default group
    wire_device: torch.device = CPU  # of the buffers that the backend sends from and receives into

    @classmethod
    def of(cls, process_group: ProcessGroup | None = None, device: torch.device = CPU) -> Group:
        """Return the view of a process group, for tensors on ``device``; a process that has joined none is alone."""
        if process_group is None and not dist.is_initialized():
            return cls(0, 1)
        rank = dist.get_rank(process_group)
        if rank < 0:  # this worker is not in the group
            return cls(rank, 0, process_group)
        return cls(rank, dist.get_world_size(process_group), process_group, wire_device(process_group, device))

    def sum(self, numbers: Tensor) -> Tensor:
        """Add up a CPU tensor over all workers, in place and in the order of ranks. A collective."""
        return numbers.copy_(_add(self._all_gather(numbers))) if self.size > 1 else numbers

    def expect_sum(self, count: int) -> PendingSum:
        """Return a pending sum of ``count`` numbers that are not known yet."""
        return PendingSum(self, count)

    def barrier(self) -> None:
        """Return once all workers have called this. A collective."""
        self.sum(torch.zeros(1))

    def delay_ms(self, rounds: int = 2) -> float:
        """Return the longest time that a small message takes to this worker. A collective of a backend with tags."""
        took = []
        for _ in range(rounds):  # workers leave the first barrier up to one delay apart
            pending = PendingSum(self, 1, _PING_TAG)
            self.barrier()
            began = time.perf_counter()
            pending.send([0.0])
            pending.result()
            took.append(time.perf_counter() - began)
        return 1e3 * min(took)

    def gather(self, facts: Any) -> list[Any]:
        """Return the facts (JSON) of every worker, on all of them. A collective."""
        data = _to_bytes(facts)
        if self.size == 1:
            return [json.loads(bytes(data.numpy()))]
        sizes = [int(size) for size in self._all_gather(torch.tensor([data.numel()]))]
        for worker, size in enumerate(sizes):
            _check_size(size, worker)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = self._all_gather(padded)
        return [json.loads(bytes(part[:size].numpy())) for part, size in zip(parts, sizes, strict=True)]

    def agree(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Compare ``facts`` (JSON) with those of all workers; return the union of all facts.

        A collective. If two workers have different values for one name, it raises an error on all workers that names
        the workers and the values.
        """
        everyone = self.gather(dict(facts))
        lines = []
        for name in sorted({name for known in everyone for name in known}):
            holders: dict[str, list[str]] = {}
            for worker, known in enumerate(everyone):
                if name in known:
                    holders.setdefault(json.dumps(known[name]), []).append(str(worker))
            if len(holders) > 1:
                lines.append(
                    f"  {name}: "
                    + "; ".join(
                        f"{value} on worker{'s' * (len(who) > 1)} {', '.join(who)}" for value, who in holders.items()
                    )
                )
        if lines:
            raise DisagreementError(
                "all workers of a pipeline are started with the same settings, these differ:\n"
                + "\n".join(lines)
                + "\nStart every worker with the same code, command line and thinpipe version."
            )
        return {name: value for known in everyone for name, value in known.items()}

    def send_json(self, facts: Any, peer: int, *, tag: int = 0) -> None:
        """Send facts (JSON) to one worker, which receives them with ``receive_json``."""
        data = _to_bytes(facts)
        self.send(torch.tensor([data.numel()], device=self.wire_device), peer, tag=tag)
        self.send(_with_checksum(data).to(self.wire_device), peer, tag=tag)

    def receive_json(self, peer: int, *, tag: int = 0) -> Any:
        """Receive and return the facts that one worker sends to this one."""
        size = int(self.receive(torch.zeros(1, dtype=torch.int64, device=self.wire_device), peer, tag=tag))
        _check_size(size, peer)
        message = torch.empty(size + _CHECKSUM_BYTES, dtype=torch.uint8, device=self.wire_device)
        return json.loads(bytes(_without_checksum(self.receive(message, peer, tag=tag), peer).numpy()))

    def send(self, tensor: Tensor, peer: int, *, tag: int = 0) -> None:
        """Send a tensor on the wire device; return when its memory can be changed."""
        with link_errors(f"sending to worker {peer}"):
            dist.send(tensor, group=self.process_group, group_dst=peer, tag=tag)

    def receive(self, tensor: Tensor, peer: int, *, tag: int = 0) -> Tensor:
        """Receive into a tensor on the wire device, and return it."""
        with link_errors(f"receiving from worker {peer}"):
            dist.recv(tensor, group=self.process_group, group_src=peer, tag=tag)
        return tensor

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start sending a tensor; a failure of the peer raises here or in the ``wait`` of the result."""
        with link_errors(f"sending to worker {peer}"):
            work = dist.isend(tensor, group=self.process_group, group_dst=peer, tag=tag)
        assert work is not None  # torch returns None to workers outside the group
        return work

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Post a receive into a tensor."""
        with link_errors(f"receiving from worker {peer}"):
            work = dist.irecv(tensor, group=self.process_group, group_src=peer, tag=tag)
        assert work is not None
        return work

    def send_pieces(self, pieces: Iterable[Tensor], peer: int, *, tag: int = 0) -> str:
        """Send a stream of bytes, given as CPU tensors of uint8 of any length; return its hash."""
        hashed = HashedPieces(pieces)
        for piece in in_pieces(hashed):
            self.send(piece, peer, tag=tag)
        return hashed.hexdigest()

    def receive_pieces(self, count: int, peer: int, *, tag: int = 0) -> Iterator[Tensor]:
        """Yield the ``count`` bytes that a worker sends, piece by piece; each is overwritten by the next."""
        buffer = torch.empty(min(count, PIECE), dtype=torch.uint8)
        for start in range(0, count, PIECE):
            yield self.receive(buffer[: count - start], peer, tag=tag)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return a tensor of the same size from every worker; verify the checksum of each."""
        message = _with_checksum(tensor.contiguous().view(-1).view(torch.uint8)).to(self.wire_device)
        parts = [torch.empty_like(message) for _ in range(self.size)]
        with link_errors("a collective of all workers"):
            dist.all_gather(parts, message, group=self.process_group)
        received = [_without_checksum(part, worker) for worker, part in enumerate(parts)]
        return [part.view(tensor.dtype).view(tensor.shape) for part in received]


class PendingSum:
    """An all-reduce of doubles whose receives are posted before the numbers are known; the backend must have tags.

    gloo sends data only after the receiver has posted its receive. Here receives are posted on construction, so the
    numbers reach the others after one network delay, while a collective takes two or more.
    """

    def __init__(self, group: Group, count: int, tag: int = _SUM_TAG) -> None:
        self._group, self._tag = group, tag
        self._parts = [torch.empty(count * 8 + _CHECKSUM_BYTES, dtype=torch.uint8) for _ in range(group.size)]
        self._peers = [peer for peer in range(group.size) if peer != group.rank]
        self._works = [group.irecv(self._parts[peer], peer, tag) for peer in self._peers]

    def send(self, numbers: Sequence[float]) -> None:
        """Send the numbers of this worker; call it once."""
        message = _with_checksum(torch.tensor(numbers, dtype=torch.float64).view(torch.uint8))
        self._parts[self._group.rank] = message
        self._works += [self._group.isend(message, peer, self._tag) for peer in self._peers]

    def result(self) -> list[float]:
        """Wait for all workers and return the sums, added in the order of ranks."""
        with link_errors("a sum over all workers"):
            for work in self._works:
                work.wait()
        received = [_without_checksum(part, worker) for worker, part in enumerate(self._parts)]
        return _add([part.view(torch.float64) for part in received]).tolist()


def _to_bytes(facts: Any) -> Tensor:
    data = json.dumps(facts).encode()
    if len(data) > LARGEST:
        raise ValueError(f"a message between workers has at most {LARGEST} bytes, got {len(data)}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _check_size(size: int, worker: int) -> None:
    if not 0 <= size <= LARGEST:
        raise ChecksumError(f"worker {worker} announced {size} bytes, and {LARGEST} are the most: rejected")


def _add(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, added in their order."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def _with_checksum(data: Tensor) -> Tensor:
    return torch.cat([data, _checksum(data)])


def _without_checksum(message: Tensor, worker: int) -> Tensor:
    """Return a message without its checksum; raise ChecksumError if that does not match."""
    data, checksum = message.cpu().split([message.numel() - _CHECKSUM_BYTES, _CHECKSUM_BYTES])
    if not torch.equal(_checksum(data), checksum):
        raise ChecksumError(
            f"a message of worker {worker} was changed on its way; look for errors of the network or of memory, then "
            "go on from the last checkpoint"
        )
    return data.clone()


def _checksum(data: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(xxhash.xxh3_64_digest(data.numpy().data)), dtype=torch.uint8)
