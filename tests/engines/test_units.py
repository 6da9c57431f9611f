"""Models as units: what they share, and what stays with the client."""

import pytest
import torch
from torch import nn

from thinpipe.engines.shapes import Meta
from thinpipe.engines.units import check_private, check_shared
from thinpipe.pipeline.partition import StageModule


def test_weights_at_both_ends_belong_to_one_worker() -> None:
    first, middle, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    check_shared([first, middle, last], workers=2)  # client and server: the client has both ends
    with pytest.raises(ValueError, match="tied embeddings"):
        check_shared([first, middle, last], workers=3)


class Asking(nn.Linear):
    asks = ("input_ids",)


def test_inputs_go_only_to_those_who_have_the_data() -> None:
    """The client has the first and the last stage; at the end of a line are the labels, and so all the data."""
    plain, asking, states = nn.Linear(4, 4), Asking(4, 4), (Meta((2, 4), torch.float32),)
    check_private([StageModule([plain]), StageModule([plain]), StageModule([plain, asking])], [states] * 4)
    check_private([StageModule([plain, asking]), StageModule([plain])], [states] * 3)
    with pytest.raises(ValueError, match="input_ids in layers that stage 1 has, so tokens or images would travel"):
        check_private([StageModule([plain]), StageModule([asking]), StageModule([plain])], [states] * 4)
    with pytest.raises(ValueError, match="would travel"):  # a first block that is given the images themselves
        check_private([StageModule([plain]), StageModule([asking])], [states, (), states])


def test_a_stage_hands_inputs_to_the_units_that_ask_for_them() -> None:
    class Adding(nn.Module):
        asks = ("input_ids",)

        def forward(self, states: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
            return states + input_ids

    stage = StageModule([nn.Identity(), Adding()])
    assert stage.asks == {"input_ids"}
    assert stage(torch.ones(2), input_ids=torch.tensor([1, 2])).tolist() == [2, 3]
