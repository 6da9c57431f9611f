"""Groups: what arrives is what was sent, or an error that names the sender."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from thinpipe.comm.errors import ChecksumError
from thinpipe.comm.group import LARGEST, Group
from thinpipe.comm.streams import PIECE, HashedPieces, fill_tensors, tensor_pieces


def send_all_kinds(process_group: Any) -> tuple[list[Any], list[float], Any]:
    group = Group.of(process_group)
    rank = group.rank
    gathered = group.gather({"worker": rank, "text": "ä" * (1 + 100 * rank)})
    numbers = group.sum(torch.tensor([0.1, rank], dtype=torch.float64))
    pending = group.expect_sum(2)
    pending.send([0.1, rank])
    assert pending.result() == numbers.tolist()
    group.barrier()
    if rank == 0:
        group.send_json({"size": [1, 2]}, 1)
    return gathered, numbers.tolist(), group.receive_json(0) if rank == 1 else None


def test_all_workers_receive_the_same(pool: Pool) -> None:
    results = pool.run(send_all_kinds, 3)
    for gathered, numbers, _ in results:
        assert [each["worker"] for each in gathered] == [0, 1, 2]
        assert [len(each["text"]) for each in gathered] == [1, 101, 201]
        assert numbers == [0.1 + 0.1 + 0.1, 3.0]
    assert results[1][2] == {"size": [1, 2]}


def add_up(process_group: Any) -> None:
    Group.of(process_group).sum(torch.ones(3, dtype=torch.float64))


def await_sum(process_group: Any) -> None:
    pending = Group.of(process_group).expect_sum(3)
    pending.send([1.0, 1.0, 1.0])
    pending.result()


def with_changed_bytes(group: Any, sum_up: Callable[[Any], None], position: int) -> str:
    """Return the error on worker 0 if a byte of worker 1's message is changed."""
    gather, send = dist.all_gather, dist.isend

    def changed(parts: list[torch.Tensor], message: torch.Tensor, **options: Any) -> None:
        gather(parts, message, **options)
        if group.rank() == 0:
            parts[1][position] ^= 1

    def send_changed(message: torch.Tensor, **options: Any) -> Any:
        sent = message.clone()
        sent[position] ^= group.rank()
        return send(sent, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", changed)
        patch.setattr(dist, "isend", send_changed)
        try:
            sum_up(group)
        except ChecksumError as error:
            return str(error)
    return "nothing noticed"


@pytest.mark.parametrize("position", [0, 23, 24, 31], ids=["first", "last", "checksum", "its end"])
@pytest.mark.parametrize("sum_up", [add_up, await_sum])
def test_changed_bytes_are_noticed(pool: Pool, sum_up: Callable[[Any], None], position: int) -> None:
    errors = pool.run(with_changed_bytes, 2, sum_up, position)
    assert "a message of worker 1 was changed on its way" in errors[0]
    assert errors[1] == "nothing noticed"


def test_a_group_of_one_worker_needs_no_other() -> None:
    alone = Group.of(None)
    pending = alone.expect_sum(2)
    pending.send([0.5, -2])
    assert pending.result() == [0.5, -2.0]
    assert alone.gather({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert alone.agree({"a": 1}) == {"a": 1}


def with_oversized_message(process_group: Any) -> str:
    """Worker 1 announces more bytes than the limit."""
    group = Group.of(process_group)
    if group.rank == 1:
        group._all_gather(torch.tensor([1 << 40]))
        return "announced"
    try:
        group.gather(None)
    except ChecksumError as error:
        return str(error)
    return "accepted"


def test_allocations_for_peers_are_bounded(pool: Pool) -> None:
    assert "worker 1 announced 1099511627776 bytes" in pool.run(with_oversized_message, 2)[0]
    with pytest.raises(ValueError, match="at most"):
        Group.of(None).gather("x" * (LARGEST + 1))


def stream_tensors(process_group: Any) -> tuple[str, list[torch.Tensor]]:
    group = Group.of(process_group)
    tensors = [torch.arange(PIECE // 4 + 5, dtype=torch.float32), torch.empty(0, 3), torch.arange(7)]
    if group.rank == 0:
        return group.send_pieces(tensor_pieces(tensors), 1), []
    size = sum(each.numel() * each.element_size() for each in tensors)
    pieces = HashedPieces(group.receive_pieces(size, 0))
    received = list(fill_tensors([torch.empty_like(each) for each in tensors], pieces))
    assert all(map(torch.equal, received, tensors))
    assert pieces.bytes == size
    return pieces.hexdigest(), received


def test_a_stream_arrives_with_its_hash(pool: Pool) -> None:
    (sent, _), (received, tensors) = pool.run(stream_tensors, 2)
    assert sent == received
    assert len(tensors) == 3
