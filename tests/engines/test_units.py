"""Models as units: what they share, and what stays with the client."""

import pytest
from torch import nn

from thinpipe.engines.units import check_private, check_shared


def test_weights_at_both_ends_belong_to_one_worker() -> None:
    first, middle, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    check_shared([first, middle, last], workers=2)  # client and server: the client has both ends
    with pytest.raises(ValueError, match="tied embeddings"):
        check_shared([first, middle, last], workers=3)


def test_a_model_whose_inputs_would_travel_is_not_cut() -> None:
    check_private("Fine", [(("in", 0, 0),), (("out", 0, 0),)])
    with pytest.raises(ValueError, match="would travel to the servers"):
        check_private("Leaky", [(("in", 0, 0), ("input", 0, 0)), (("out", 0, 0),)])
