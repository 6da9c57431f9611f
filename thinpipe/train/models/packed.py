"""Packed sequences: several texts in one row of tokens, whose positions restart with each text.

The mask code of transformers (seen: 5.17, 5.22) finds the texts by these positions, if there is no attention mask, and
attention does not cross them. Positions are an input that all workers receive. Code of models that has another mask, or
keeps a state from token to token, ignores them; ``can_pack`` compares instead of guessing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.train.models.forward import call_model, takes
from thinpipe.train.models.tiny import LAYERS, ORDINARY_TOKENS
from thinpipe.train.models.verify import compare

INPUTS = ("input_ids", "position_ids")  # of a model with packed sequences
_LENGTHS = (5, 1, 17, 9)  # tokens of the compared texts: some longer than the attention window of a small copy
_TOLERANCE = 1e-4  # of the largest logit; kernels sum rows of other lengths in another order


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the numbers of the texts of each row: the best-fit decreasing heuristic, in the order of first texts."""
    rooms: list[int] = []  # distinct numbers of free tokens, sorted
    rows: dict[int, list[list[int]]] = {}  # free tokens -> rows
    for number in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        place = bisect_left(rooms, lengths[number])
        room, row = capacity, list[int]()
        if place < len(rooms):
            room = rooms[place]
            row = rows[room].pop()
            if not rows[room]:
                del rows[room], rooms[place]
        row.append(number)
        left = room - lengths[number]
        if left not in rows:
            rows[left] = []
            insort(rooms, left)
        rows[left].append(row)
    return sorted(sorted(row) for each in rows.values() for row in each)


def positions(lengths: Sequence[int], total: int) -> Tensor:
    """Return the positions of texts of these lengths in a row of ``total`` tokens; the rest is one more text."""
    return torch.cat([torch.arange(each) for each in (*lengths, total - sum(lengths))])


def can_pack(model: nn.Module) -> bool:
    """Return True if a small causal model computes packed texts as it does each alone, also when cut into units."""
    model = model.float().eval()
    if not takes(model, "position_ids"):
        return False
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    last = min(ORDINARY_TOKENS.stop, config.get_text_config().vocab_size)
    ids = torch.randint(ORDINARY_TOKENS.start, last, (2, sum(_LENGTHS) + 3), generator=generator)
    inputs = {"input_ids": ids, "position_ids": torch.stack([positions(_LENGTHS, ids.shape[1])] * 2)}
    inputs["position_ids"][1] = torch.arange(ids.shape[1])  # one text
    try:
        with torch.no_grad():
            packed = call_model(model, inputs)
            alone = [call_model(model, {"input_ids": each}) for each in ids[:1, : sum(_LENGTHS)].split(_LENGTHS, dim=1)]
            wanted = [*alone, call_model(model, {"input_ids": ids[1:]})]
        found = [*packed[:1, : sum(_LENGTHS)].split(_LENGTHS, dim=1), packed[1:]]
        largest = max(float(each.abs().max()) for each in wanted)
        error = max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))
        return error <= _TOLERANCE * largest and compare(model, inputs, alone=LAYERS).is_exact
    except Exception:  # code that was not written for this may raise anything: texts are padded then
        return False
