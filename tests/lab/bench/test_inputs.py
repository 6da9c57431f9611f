"""Options of benchmarks are parsed, or rejected with the rule."""

import pytest
import torch

from thinpipe.codecs import FAMILIES, codec
from thinpipe.lab.bench.codecs.codec_options import DEFAULT_CODECS, DEFAULT_SHAPES, CodecBenchOptions, parse_shape
from thinpipe.lab.bench.codecs.synthetic import DEFAULT_CONTENTS
from thinpipe.lab.bench.inputs import find_device, parse_codecs


def test_the_default_codecs_cover_every_family():
    assert {each.spec.partition(":")[0] for each in parse_codecs(DEFAULT_CODECS)} == FAMILIES.keys()


def test_a_recipe_is_its_two_codecs():
    specs = [each.spec for each in parse_codecs("4bit,tile:8,8bit")]
    assert specs == ["gauss:5+coded", "gauss:3.35+coded+unbiased", "tile:8", "tile:8+zero"]
    assert {"tile:8", "tile:8+zero", "tile:4"} <= {each.spec for each in parse_codecs(DEFAULT_CODECS)}
    with pytest.raises(ValueError, match="there is no recipe '5bit'"):
        parse_codecs("5bit")


def test_the_same_codec_written_twice_is_one():
    assert [each.spec for each in parse_codecs("sort:8, sort:6+2,none")] == ["sort:6+2", "none"]


@pytest.mark.parametrize("text", ["2,3,4", "2x3x4", "[2, 3, 4]", "(2,3,4)"])
def test_shapes(text):
    assert parse_shape(text) == (2, 3, 4)


@pytest.mark.parametrize("text", ["", "2,,3", "2,-3", "0,3", "2.5", "a"])
def test_shapes_that_make_no_sense(text):
    with pytest.raises(ValueError, match="shape takes whole numbers from 1 to"):
        parse_shape(text)


def test_nothing_given_means_every_default():
    cases = CodecBenchOptions(device="cpu").cases()
    assert {case.shape for case in cases} == set(DEFAULT_SHAPES)
    assert {case.content for case in cases} == set(DEFAULT_CONTENTS)
    assert len(cases) == len(DEFAULT_SHAPES) * len(DEFAULT_CONTENTS)


def test_given_shapes_meet_given_contents():
    cases = CodecBenchOptions(shape=("2,3", "4", "2x3"), content=("laplace",)).cases()
    assert [(case.shape_text, case.content) for case in cases] == [("2x3", "laplace"), ("4", "laplace")]


def test_unknown_content_and_file_with_shape_are_refused(tmp_path):
    with pytest.raises(ValueError, match="relu6, outliers, laplace, heavy, masked; got 'relu7'"):
        CodecBenchOptions(content=("relu7",)).cases()
    with pytest.raises(ValueError, match="not both"):
        CodecBenchOptions(shape=("2,3",), from_=tmp_path / "tensors.safetensors").cases()


def test_devices():
    assert find_device("cpu", [codec("fp16")]) == torch.device("cpu")
    assert find_device("auto", []).type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="got 'gpu'"):
        find_device("gpu", [])
    with pytest.raises(ValueError, match="cuda:99: "):
        find_device("cuda:99", [])
