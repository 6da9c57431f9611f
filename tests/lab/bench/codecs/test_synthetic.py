"""Made tensors hold what their names say; files give what they hold."""

import pytest
import torch
from safetensors.torch import save_file

from thinpipe.lab.bench.codecs.synthetic import CONTENTS, cases_from_file, made_cases

SHAPE = (4, 24, 14, 14)


def load(content, shape=SHAPE):
    (case,) = made_cases([shape], [content])
    x = case.load()
    assert x.shape == shape
    return x


@pytest.mark.parametrize("content", CONTENTS)
def test_made_tensors_are_the_same_each_time(content):
    assert torch.equal(load(content), load(content))


def test_half_of_relu6_is_zero_and_none_is_above_six():
    x = load("relu6")
    assert 0.45 < (x == 0).float().mean() < 0.55
    assert x.min() == 0
    assert 1 < x.max() <= 6


@pytest.mark.parametrize(("shape", "channel_dim"), [(SHAPE, 1), ((4, 50, 96), 2), ((500, 96), 1)])
def test_six_channels_are_outliers(shape, channel_dim):
    deviations = load("outliers", shape).movedim(channel_dim, 0).flatten(1).std(dim=1)
    assert (deviations > 10).sum() == 6
    assert (deviations < 2).sum() == len(deviations) - 6


def test_laplace_has_both_signs_and_long_tails():
    x = load("laplace")
    assert 0.45 < (x > 0).float().mean() < 0.55
    kurtosis = x.pow(4).mean() / x.pow(2).mean() ** 2
    assert 4.5 < kurtosis < 7.5  # 6 for Laplace, 3 for a normal distribution


def test_heavy_has_longer_tails_still():
    x = load("heavy")
    assert x.pow(4).mean() / x.pow(2).mean() ** 2 > 50


def test_half_of_a_masked_gradient_is_zero_between_both_signs():
    x = load("masked")
    assert 0.45 < (x == 0).float().mean() < 0.55
    assert x.min() < 0 < x.max()


def test_a_file_gives_its_float_tensors(tmp_path):
    path = tmp_path / "tensors.safetensors"
    tensors = {"a": torch.randn(3, 4), "half": torch.ones(5).half(), "ids": torch.arange(3), "empty": torch.ones(0)}
    save_file(tensors, path)
    cases = {case.content: case for case in cases_from_file(path)}
    assert cases.keys() == {"a", "half"}
    assert cases["a"].shape == (3, 4)
    assert torch.equal(cases["a"].load(), tensors["a"])
    assert cases["half"].load().dtype == torch.float16


def test_files_that_do_not_do_are_one_clear_error(tmp_path):
    integers, damaged = tmp_path / "integers.safetensors", tmp_path / "damaged.safetensors"
    save_file({"ids": torch.arange(3)}, integers)
    damaged.write_bytes(integers.read_bytes()[:-4])
    for path, message in (
        (tmp_path / "none.safetensors", "cannot be read"),
        (tmp_path, "cannot be read"),
        (damaged, "damaged.safetensors cannot be read as safetensors"),
        (integers, "none of its 1 tensors is one of floats"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            cases_from_file(path)
        assert "\n" not in str(error.value)
