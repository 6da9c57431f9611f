"""Specs: canonical forms, and the errors of invalid ones."""

import pytest
import torch

import thinpipe
from thinpipe.codecs import FAMILIES


@pytest.mark.parametrize(
    ("short", "canonical"),
    [
        ("sort:16", "sort:12+4"),
        ("sort:12", "sort:9+3"),
        ("sort:8", "sort:6+2"),
        ("sort:4", "sort:3+1"),
        ("sort:2", "sort:1+1"),
        ("sort:1", "sort:1+0"),
        ("fast:6", "fast:5+1"),
        ("fast:6+2", "fast:6+2"),
        (" uniform:8 ", "uniform:8"),
        ("topk:0.10", "topk:0.1"),
        ("topk:1e-3", "topk:0.001"),
        ("topk:0.123456789", "topk:0.123456789"),
        ("tile:4", "tile:4"),
        ("tile:4/256", "tile:4"),
        ("tile:2/64", "tile:2/64"),
        ("tile:2/64+sr+rot", "tile:2/64+rot+sr"),
        ("tile:8/16+zero+sr", "tile:8/16+sr+zero"),
        ("gauss:4/256", "gauss:4"),
        ("gauss:2/512", "gauss:2/512"),
        ("gauss:5.0+unbiased+coded", "gauss:5+coded+unbiased"),
        ("gauss:3.35/256+coded", "gauss:3.35+coded"),
        ("none", "none"),
    ],
)
def test_specs_have_one_canonical_form(short, canonical):
    codec = thinpipe.codec(short)
    assert codec.spec == canonical
    assert thinpipe.codec(canonical) == codec
    assert thinpipe.codec(codec) is codec


PRESETS = "presets: 8bit, 4bit, 3bit, 2bit, 1bit; codecs: none, fp16, "


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("8bits", "there is no codec '8bits' (did you mean 8bit?); " + PRESETS),
        (" 4bti", "there is no codec '4bti' (did you mean 4bit?); " + PRESETS),
        ("unifrom:8", "there is no codec 'unifrom' (in 'unifrom:8') (did you mean uniform:8?); " + PRESETS),
        ("axes", "there is no codec 'axes' (did you mean axes:2?); " + PRESETS),
        ("zip:9", "there is no codec 'zip' (in 'zip:9'); " + PRESETS),
        (
            "4bit",
            "4bit is a preset of two codecs, gauss:5+coded for activations and gauss:3.35+coded+unbiased for "
            "gradients; here take one codec",
        ),
    ],
)
def test_the_error_of_an_unknown_name_suggests_the_nearest_and_lists_presets_first(spec, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011, the complete text is compared
        thinpipe.codec(spec)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("sort:0+9", "0 level bits"),
        ("sort:8+9", "9 split bits"),
        ("sort:9+8", "more than 16"),
        ("sort:0", "0 level bits"),
        ("sort:17", "more than 16"),
        ("sort:6+", "not an integer"),
        ("sort:-6+2", "not an integer"),
        ("fast:6+2+1", "not an integer"),
        ("uniform:17", "17 bits"),
        ("uniform:0", "0 bits"),
        ("uniform", "not an integer"),
        ("uniform:8.0", "not an integer"),
        ("kmeans:9", "9 bits"),
        ("tile:0", "0 bits"),
        ("tile:9", "9 bits"),
        ("tile:4/8", "a tile of 8 values"),
        ("tile:4/8192", "a tile of 8192 values"),
        ("tile:4/100", "a tile of 100 values"),
        ("tile:4/", "not an integer"),
        ("tile:x/64", "not an integer"),
        ("tile:4+sr+64", "not an integer"),
        ("tile:4+sr+sr", r"\+sr is there twice"),
        ("tile:4+bogus", r"no option \+bogus here, there are: \+rot, \+sr, \+zero"),
        ("tile:1+zero", r"\+zero needs 2 bits"),
        ("tile:4+zero+rot", "exclude each other"),
        ("gauss:0", "0 bits"),
        ("gauss:9", "9 bits"),
        ("gauss:4/8", "a tile of 8 values"),
        ("gauss:4+zero", r"no option \+zero here, there are: \+coded, \+unbiased"),
        ("gauss:4/64+sr", r"no option \+sr here"),
        ("gauss:2.5", "'2.5' is not an integer"),
        ("gauss:0.9+coded", "0.9 bits are not from 1 to 8"),
        ("gauss:3/64+coded", r"\+coded has blocks of 256 values, not of 64"),
        ("gauss:nan+coded", "nan bits are not from 1 to 8"),
        ("gauss:x+coded", "could not convert"),
        ("svd:x", "not an integer"),
        ("power:0", "rank 0"),
        ("topk:0", "above 0"),
        ("topk:1.5", "at most 1"),
        ("topk:nan", "nan"),
        ("topk:much", "much"),
        ("none:1", "too many"),
        ("bogus:3", "no codec 'bogus'"),
        ("", "no codec ''"),
    ],
)
def test_the_error_of_an_invalid_spec_states_the_rule_and_lists_codecs(spec, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        thinpipe.codec(spec)
    message = str(caught.value)
    name = spec.split(":")[0]
    if name in FAMILIES:
        assert FAMILIES[name].rule in message
    for family in FAMILIES:
        assert family in message


def test_a_spec_is_text():
    with pytest.raises(TypeError, match="int"):
        thinpipe.codec(8)


def test_kernels_are_named():
    with pytest.raises(ValueError, match="'auto' or 'reference'"):
        thinpipe.codec("uniform:8", kernels="fastest").encode(torch.ones(3))
