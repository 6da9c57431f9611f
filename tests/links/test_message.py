"""Messages that are changed on their way, or belong to another step, are refused by name."""

from __future__ import annotations

import pytest
import torch

from thinpipe.links.message import CHECKSUM_BYTES, is_intact, seal


def sealed(size: int = 100) -> torch.Tensor:
    message = torch.randint(256, (size + CHECKSUM_BYTES,), dtype=torch.uint8)
    seal(message, step=7, chunk=3, slot=1)
    return message


def test_a_sealed_message_is_intact() -> None:
    for size in (0, 1, 100, 4097):
        assert is_intact(sealed(size), 7, 3, 1)


@pytest.mark.parametrize("numbers", [(8, 3, 1), (7, 2, 1), (7, 3, 0), (3, 7, 1)])
def test_it_belongs_to_one_step_chunk_and_slot(numbers: tuple[int, int, int]) -> None:
    assert not is_intact(sealed(), *numbers)


def test_every_flipped_bit_is_noticed() -> None:
    message = sealed(20)
    for position in range(message.numel()):
        for bit in range(8):
            message[position] ^= 1 << bit
            assert not is_intact(message, 7, 3, 1)
            message[position] ^= 1 << bit
