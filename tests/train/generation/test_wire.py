"""Messages of generation: what was packed comes out, and every tensor of every message is rounded by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from thinpipe.codecs.spec import codec
from thinpipe.comm.errors import ChecksumError
from thinpipe.links.slot import Slot
from thinpipe.train.generation.wire import Head, Kind, Limits, Packing
from thinpipe.train.models.decoding import Step

CPU = torch.device("cpu")
TEXTS, TOKENS, VALUES = 2, 8, 128  # enough that the codec is used
HEAD = Head(kind=Kind.STATES, texts=TEXTS, tokens=TOKENS, has_mask=True, has_positions=True, encoded=True)
SLOTS = (Slot(torch.Size([VALUES]), torch.float32),) * 2
PACKING = Packing(states=SLOTS, codec=codec("tile:4+sr"), seed=1, source=0)


def step() -> Step:
    """The same values in both tensors."""
    states = torch.randn(TEXTS, TOKENS, VALUES, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(TEXTS * TOKENS).view(TEXTS, TOKENS) % 2
    return Step(states=(states, states.clone()), mask=mask, positions=torch.arange(TOKENS).expand(TEXTS, TOKENS) + 300)


def states_of(packing: Packing, head: Head) -> list[torch.Tensor]:
    return list(packing.unpack(packing.pack(head, step()), head, CPU).states)


def test_pack_and_unpack_are_inverse() -> None:
    given = step()
    for encoded in (True, False):
        head = replace(HEAD, encoded=encoded)
        message = PACKING.pack(head, given)
        assert (Head.read(message), message.numel()) == (head, PACKING.size(head))
        found = PACKING.unpack(message, head, CPU)
        assert torch.equal(found.mask, given.mask)
        assert torch.equal(found.positions, given.positions)
        for state, right in zip(found.states, given.states, strict=True):
            assert torch.equal(state, right) != encoded
            assert (state - right).norm() < 0.3 * right.norm()


def test_every_tensor_message_and_worker_is_rounded_by_itself() -> None:
    others = [(PACKING, replace(HEAD, number=1)), (replace(PACKING, source=1), HEAD), (replace(PACKING, seed=2), HEAD)]
    found = [state for packing, head in [(PACKING, HEAD), *others] for state in states_of(packing, head)]
    assert len({state.numpy().tobytes() for state in found}) == len(found)
    again = states_of(PACKING, HEAD)
    assert all(torch.equal(*pair) for pair in zip(again, found, strict=False))


def test_no_message_is_larger_than_the_run() -> None:
    facts = {"prompts": 10, "longest": 300}
    limits = Limits.of(facts, batch_size=4, max_tokens=256)
    assert limits == Limits(texts=4, tokens=256)
    assert Limits.of(facts, batch_size=None, max_tokens=None) == Limits(texts=10, tokens=300)
    limits.check(replace(HEAD, texts=4, tokens=256), 1)
    for texts, tokens in ((5, 1), (1, 257), (2**32 - 1, 2**32 - 1)):
        with pytest.raises(ChecksumError, match=f"worker 1 announced {texts} texts of {tokens} tokens, and 4 of 256"):
            limits.check(replace(HEAD, texts=texts, tokens=tokens), 1)
