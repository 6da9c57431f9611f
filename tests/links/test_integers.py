"""Masks and other integers alongside hidden states: what arrives, in how many bytes, and what damage is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pipeline.models import batch, seeded
from tests.pool import Pool
from thinpipe.codecs.integers import INTEGERS, encode_integers, most_integer_bytes
from thinpipe.comm.errors import ChecksumError
from thinpipe.links.counters import Ledger
from thinpipe.links.message import CHECKSUM_BYTES, Message, pack, seal
from thinpipe.links.slot import Route
from thinpipe.links.transport import transport
from thinpipe.pipeline import LinearSchedule, PipelineStage
from thinpipe.pipeline.report import report

CHUNKS, ROWS, WIDTH = 6, 4, 32  # more chunks than a link has under way at once
# Bits of the numbers in each step: short wires after long ones, and the other way round.
STEPS = (0, 7, 64, 1, 40, 0)


def numbers(step: int, chunk: int) -> list[Tensor]:
    """Yield integers of every type, with shapes and strides of all kinds."""
    draw = torch.Generator().manual_seed(100 * step + chunk)
    wide = torch.randint(-(2**63), 2**63 - 1, (ROWS, 70), generator=draw)
    bits = STEPS[step]
    narrow = wide >> (64 - bits) if bits else torch.zeros_like(wide)  # from -2^(bits - 1) up
    typed = [narrow.ne(0) if dtype == torch.bool else narrow.to(dtype) for dtype in INTEGERS]
    return [*typed, narrow.t(), narrow[:, ::3], narrow[:, 5], narrow[0, 0], narrow[:, :0], wide]


def needed(tensor: Tensor) -> int:
    wire = torch.empty(most_integer_bytes(tensor.nbytes), dtype=torch.uint8)
    return encode_integers(tensor.contiguous(), wire) + CHECKSUM_BYTES


class Sends(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, list[tuple[int, int]]()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        step, chunk = self.calls.pop(0) if self.calls else (0, 0)
        return self.inner(x), *numbers(step, chunk)


class Receives(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.heard = inner, list[tuple[Tensor, ...]]()

    def forward(self, x: Tensor, *found: Tensor) -> Tensor:
        self.heard.append(tuple(each.clone() for each in found))
        return self.inner(x)


def exchange(group: Any, post_ahead: bool, traced: bool) -> tuple[list[Any], int, float]:
    """Return the tensors received in all steps, the bytes of the forward link at both ends, and its packing time."""
    worker, inner = group.rank(), seeded(2, WIDTH)[group.rank()]
    module = (Sends, Receives)[worker](inner)
    hidden, found = torch.empty(ROWS, WIDTH), numbers(0, 0)
    ins = (hidden.requires_grad_(), *found) if worker else (hidden,)
    outs = (hidden,) if worker else (hidden.requires_grad_(), *found)
    stage = PipelineStage(
        module, worker, 2, "cpu", ins, outs, group=group, forward="none", backward="none", post_ahead=post_ahead
    )
    schedule = LinearSchedule(stage, CHUNKS, nn.functional.mse_loss)
    x, y = batch(CHUNKS * ROWS, WIDTH)
    for step in range(len(STEPS)):
        if isinstance(module, Sends):
            module.calls = [(step, chunk) for chunk in range(CHUNKS)]
        stage.trace(traced and step % 2 == 1)
        schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None)
    link = next(link for link in stage.links if link.direction == "forward")
    received = report([stage])[0]
    assert link.counters().wire_bytes == received.wire_bytes
    heard = module.heard if isinstance(module, Receives) else []
    return heard, received.wire_bytes, received.decode_ms if worker else received.encode_ms


@pytest.mark.parametrize(("post_ahead", "traced"), [(True, True), (False, False)], ids=["ahead", "in order"])
def test_integers_arrive_as_they_were_in_the_bytes_they_need(pool: Pool, post_ahead: bool, traced: bool) -> None:
    (_, sent_bytes, encode_ms), (heard, received_bytes, decode_ms) = pool.run(exchange, 2, post_ahead, traced)
    hidden = len(STEPS) * CHUNKS * (ROWS * WIDTH * 4 + CHECKSUM_BYTES)
    sent = [numbers(step, chunk) for step in range(len(STEPS)) for chunk in range(CHUNKS)]
    assert sent_bytes == received_bytes == hidden + sum(needed(each) for chunk in sent for each in chunk)
    assert len(heard) == len(sent)
    for got, gave in zip(heard, sent, strict=True):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, gave, strict=True))
    assert min(encode_ms, decode_ms) > 0


def test_damage_of_any_bit_is_noticed(tmp_path: Any) -> None:
    """The first byte encodes the length of the message: no value of it leads outside of the buffer."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        receiver = transport(Route(0, 1, False, torch.device("cpu"), dist.group.WORLD), Ledger(), scheduled=False)
        mask = torch.arange(40).remainder(3).eq(0).long()
        for size in (40, 1):  # codes, and all the same
            storage = torch.zeros(8 * size + 1 + CHECKSUM_BYTES, dtype=torch.uint8)
            storage[: 8 * size] = mask[:size].view(torch.uint8)
            message = Message(3, 1, 0, size=8 * size, raw=True, integers=torch.int64, storage=storage)
            pack(message)
            seal(message.buffer, 3, 1, 0)
            length, full = len(message.buffer), storage.clone()
            for place in range(length):
                for bit in range(8):
                    storage.copy_(full)
                    storage[place] ^= 1 << bit
                    with pytest.raises(ChecksumError, match="chunk 1 of step 3"):
                        receiver.accept(message)
            storage.copy_(full)
            receiver.accept(message)
            assert len(message.buffer) == length == 9 + (5 if size > 1 else 0) + CHECKSUM_BYTES
            assert torch.equal(receiver.memory.open(message).view(torch.int64), mask[:size])
    finally:
        dist.destroy_process_group()
