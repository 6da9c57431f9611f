"""The losses are measured as they are defined."""

import math

import pytest
import torch

from thinpipe.lab.bench.codecs.codec_columns import bias, measure_losses, relative_squared_error


def test_relative_squared_error():
    x = torch.tensor([3.0, 4.0])
    assert relative_squared_error(x, x) == 0
    assert relative_squared_error(x, torch.tensor([3.0, 3.0])) == pytest.approx(1 / 25)
    assert relative_squared_error(torch.zeros(2), torch.ones(2)) is None
    assert relative_squared_error(torch.tensor([math.nan]), torch.ones(1)) is None


def test_bias_is_the_mean_error_in_its_standard_errors():
    x = torch.zeros(4)
    assert bias(x, x) == 0
    assert bias(x, torch.tensor([1.0, -1.0, 1.0, -1.0])) == 0
    errors = torch.tensor([0.0, 0.0, 2.0, 2.0])
    assert bias(x, x + errors) == pytest.approx(1 / (math.sqrt(4 / 3) / 2))
    assert bias(x, x - errors) == -bias(x, x + errors)
    assert bias(x, x + 1) is None  # no spread to count in
    assert bias(x[:1], x[:1] + 1) is None


def test_zeros_are_held_against_the_size_of_the_tensor():
    x = torch.tensor([0.0, -0.0, 3.0, 4.0])
    lost = measure_losses(x, torch.tensor([1.0, -1.0, 3.0, 4.0]))
    assert lost.zero_fraction == 0.5
    assert lost.zero_error == pytest.approx(1 / 2.5)
    assert measure_losses(x, x).zero_error == 0


def test_without_zeros_there_is_no_error_on_them():
    x = torch.tensor([1.0, 2.0])
    assert (measure_losses(x, x).zero_error, measure_losses(x, x).zero_fraction) == (None, 0)
    assert measure_losses(torch.zeros(3), torch.ones(3)).zero_error is None
