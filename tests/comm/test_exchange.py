"""Small messages: what arrives is what was said, or an error that names who said it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from thinpipe.comm import exchange
from thinpipe.comm.backend import CPU
from thinpipe.comm.errors import ChecksumError


def say_hello(group: Any) -> tuple[list[Any], list[float], Any]:
    rank = group.rank()
    told = exchange.gather({"worker": rank, "text": "ä" * (1 + 100 * rank)}, group, CPU)
    numbers = torch.tensor([0.1, rank], dtype=torch.float64)
    exchange.add_up(numbers, group)
    awaited = exchange.Sum(2, worker=rank, workers=3, group=group)
    awaited.tell([0.1, rank])
    assert awaited.heard() == numbers.tolist()
    if rank == 0:
        exchange.tell({"size": [1, 2]}, group, 1, CPU)
    return told, numbers.tolist(), exchange.hear(group, 0, CPU) if rank == 1 else None


def test_everybody_hears_the_same(pool: Pool) -> None:
    results = pool.run(say_hello, 3)
    for told, numbers, _ in results:
        assert [each["worker"] for each in told] == [0, 1, 2]
        assert [len(each["text"]) for each in told] == [1, 101, 201]
        assert numbers == [0.1 + 0.1 + 0.1, 3.0]
    assert results[1][2] == {"size": [1, 2]}


def add_up(group: Any) -> None:
    exchange.add_up(torch.ones(3, dtype=torch.float64), group)


def await_sum(group: Any) -> None:
    awaited = exchange.Sum(3, worker=group.rank(), workers=2, group=group)
    awaited.tell([1.0, 1.0, 1.0])
    awaited.heard()


def with_changed_bytes(group: Any, sum_up: Callable[[Any], None], position: int) -> str:
    """What worker 0 finds when a byte of worker 1's message arrives changed."""
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
    assert "what worker 1 told the others was changed on its way" in errors[0]
    assert errors[1] == "nothing noticed"


def test_a_sum_of_one_worker_needs_nobody() -> None:
    alone = exchange.Sum(2, worker=0, workers=1, group=None)
    alone.tell([0.5, -2])
    assert alone.heard() == [0.5, -2.0]


def with_a_boaster(group: Any) -> str:
    """Worker 1 announces more than anybody should believe."""
    if group.rank() == 1:
        exchange._all_gather(torch.tensor([1 << 40]), group, CPU)
        return "said so"
    try:
        exchange.gather(None, group, CPU)
    except ChecksumError as error:
        return str(error)
    return "believed"


def test_nobody_can_make_others_allocate_without_bounds(pool: Pool) -> None:
    assert "worker 1 announced 1099511627776 bytes" in pool.run(with_a_boaster, 2)[0]
    with pytest.raises(ValueError, match="at most"):
        exchange.gather("x" * (exchange.LARGEST + 1), None, CPU)
