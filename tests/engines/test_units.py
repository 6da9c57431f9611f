"""Models as units: what they share, and what counts as right."""

import pytest
import torch
from torch import nn

from thinpipe.engines.engine import count_correct, loss_of
from thinpipe.engines.units import check_private, check_shared


def test_weights_at_both_ends_belong_to_one_worker() -> None:
    first, middle, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    check_shared([first, middle, last], workers=2)  # client and server: the client has both ends
    with pytest.raises(ValueError, match="tied embeddings"):
        check_shared([first, middle, last], workers=3)


def test_tokens_of_a_text_count_as_parts_of_it() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [2.0, 0.0]]])
    labels = torch.tensor([[0, 0], [0, 0]])
    assert count_correct(logits, labels) == 1.5
    assert count_correct(logits[:, 0], labels[:, 0]) == 2
    expected = torch.stack([loss_of(logits[:, place], labels[:, place]) for place in range(2)]).mean()
    assert torch.allclose(loss_of(logits, labels), expected)


def test_a_model_whose_inputs_would_travel_is_not_cut() -> None:
    check_private("Fine", [(("in", 0, 0),), (("out", 0, 0),)])
    with pytest.raises(ValueError, match="would travel to the servers"):
        check_private("Leaky", [(("in", 0, 0), ("input", 0, 0)), (("out", 0, 0),)])
