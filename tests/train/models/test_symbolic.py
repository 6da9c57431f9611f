"""Results that depend on missing values are symbolic; all others are computed."""

import pytest
import torch

from thinpipe.train.models.symbolic import SymbolicMode, SymbolicValueError, is_symbolic, symbolic

CPU = torch.device("cpu")


def test_results_of_symbolic_values_are_symbolic_with_their_shape():
    tokens = symbolic((2, 5), torch.int64, CPU)
    with SymbolicMode(CPU), torch.no_grad():
        weight = torch.empty(99, 8, device="meta")
        states = torch.nn.functional.embedding(tokens, weight)
        scores = states @ states.mT + torch.zeros(2, 5, 5)
    assert is_symbolic(states)
    assert is_symbolic(scores)
    assert (scores.shape, scores.dtype, scores.device) == ((2, 5, 5), torch.float32, CPU)


def test_results_of_shapes_alone_are_known():
    states = symbolic((2, 5, 8), torch.float32, CPU)
    with SymbolicMode(CPU), torch.no_grad():
        positions = torch.arange(states.shape[1], device=states.device)
        ones = torch.ones_like(states[..., 0])
        filled = states.new_full((3,), 7.0)
    assert positions.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(ones, torch.ones(2, 5))
    assert torch.equal(filled, torch.full((3,), 7.0))


def test_a_weight_that_is_elsewhere_makes_known_values_unknown():
    with SymbolicMode(CPU), torch.no_grad():
        learned = torch.nn.functional.embedding(torch.arange(4), torch.empty(16, 8, device="meta"))
    assert is_symbolic(learned)
    assert learned.device == CPU


def test_reading_a_symbolic_value_is_an_error():
    tokens = symbolic((2, 5), torch.int64, CPU)
    with SymbolicMode(CPU), torch.no_grad(), pytest.raises(SymbolicValueError):
        bool((tokens == 3).any())


def test_a_known_tensor_that_unknown_values_are_written_into_is_unknown():
    tokens = symbolic((2, 5), torch.int64, CPU)
    with SymbolicMode(CPU), torch.no_grad():
        shifted, untouched = tokens.new_zeros(2, 5), torch.zeros(2, 5)
        assert not is_symbolic(shifted)
        shifted[:, 1:] = tokens[:, :-1]
        assert is_symbolic(shifted)
        assert is_symbolic(shifted[0] + 1)
        assert not is_symbolic(untouched)


def test_weights_are_unknown_until_they_may_be_used():
    weight = torch.nn.Parameter(torch.ones(16, 8))
    with SymbolicMode(CPU) as flow, torch.no_grad():
        assert is_symbolic(weight + 1)
        flow.weights = True
        assert not is_symbolic(weight + 1)


def test_a_known_mask_picks_a_known_number_of_unknown_values():
    states, mask = symbolic((2, 3, 8), torch.float32, CPU), torch.tensor([[True, False, True], [False, True, False]])
    with SymbolicMode(CPU), torch.no_grad():
        picked = states[mask]
    assert is_symbolic(picked)
    assert picked.shape == (3, 8)


def test_cached_results_are_new_tensors():
    tokens, states = symbolic((2, 5), torch.int64, CPU), symbolic((2, 5, 8), torch.float32, CPU)
    with SymbolicMode(CPU), torch.no_grad():
        for _ in range(2):
            types = [(tokens * number).dtype for number in (1, 1.0, True)]
            assert types == [torch.int64, torch.float32, torch.int64]
            assert (tokens * tokens).shape == (2, 5)
            assert (states.mT.stride(), states.sum(-1).shape) == ((40, 1, 8), (2, 5))
            turned = states + 1
            turned.transpose_(1, 2)
        assert (turned.meta.shape, (states + 1).meta.shape) == ((2, 8, 5), (2, 5, 8))
        assert (states + 1) is not (states + 1)
