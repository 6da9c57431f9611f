"""delta(SPEC) as a spec: what parses, what it is called, and what it is told where it does not belong."""

import pytest
import torch

import thinpipe
from thinpipe.codecs.spec import split_specs
from thinpipe.lab.ablation.plan import expand_codecs
from thinpipe.lab.bench.inputs import parse_codecs
from thinpipe.links.delta import DEFAULT_FIRST
from thinpipe.links.spec import encoding, once


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("delta(uniform:2)", "delta(uniform:2)"),
        (" delta( sort:8 , first = fp16 ) ", "delta(sort:6+2,first=fp16)"),
        (f"delta(kmeans:2,first={DEFAULT_FIRST})", "delta(kmeans:2)"),
        ("delta(topk:0.1,first=none)", "delta(topk:0.1,first=none)"),
    ],
)
def test_one_canonical_form(written, canonical):
    found = encoding(written)
    assert found.spec == canonical
    assert encoding(canonical).codecs == found.codecs


@pytest.mark.parametrize("spec", ["sort:6+2", thinpipe.codec("sort:8")])
def test_a_codec_is_what_sends_every_tensor(spec):
    assert encoding(spec).spec == "sort:6+2"
    assert encoding(spec).codecs == (thinpipe.codec("sort:8"),)
    assert once(spec) == "sort:6+2"


def test_what_is_sent_once_goes_through_the_first_codec():
    assert once("delta(tile:2)") == DEFAULT_FIRST.spec
    assert once("delta(tile:2,first=fp16)") == "fp16"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("delta(uniform:2", "its bracket is not closed"),
        ("delta()", "no codec ''"),
        ("delta(uniform:99)", "99 bits"),
        ("delta(none)", "saves nothing"),
        ("delta(power:4)", "must decode the same bits, and power:4 does not promise that"),
        ("delta(uniform:2,first=svd:4)", "must decode the same bits, and svd:4 does not promise that"),
        ("delta(delta(uniform:2))", "one delta in a spec"),
        ("delta(uniform:2,first=delta(uniform:4))", "one delta in a spec"),
        ("delta(uniform:1)", "the two levels of uniform:1 are the ends"),
        ("delta(sort:1)", "the two levels of sort:1+0 are the ends"),
        ("delta(tile:1/16+rot)", "the two levels of tile:1/16+rot are the ends"),
        ("delta(uniform:2,last=fp16)", "'last=fp16' is not first=SPEC"),
        ("delta(uniform:2,fp16)", "'fp16' is not first=SPEC"),
        ("delta(uniform:2,first=fp16,first=bf16)", "is not first=SPEC"),
    ],
)
def test_what_makes_no_sense_is_told_the_rule(spec, reason):
    with pytest.raises(ValueError, match="makes no sense") as error:
        encoding(spec)
    assert reason in str(error.value)
    assert "as in delta(kmeans:2) or delta(kmeans:2,first=fp16)" in str(error.value)


def drift(change: str) -> list[float]:
    """How far a copy is from what it copies after each of 20 passes that change that a little; in sizes of a change."""
    draw = torch.Generator().manual_seed(1)
    codec = thinpipe.codec(change)
    x = torch.randn(8192, generator=draw)
    copy = x.clone()
    far = []
    for number in range(20):
        step = 0.02 * torch.randn(x.shape, generator=draw)
        x = x + step
        copy = copy + codec.decode(codec.encode(x - copy, key=number), torch.empty_like(x))
        far.append(float((x - copy).norm() / step.norm()))
    return far


@pytest.mark.parametrize("change", ["kmeans:1", "uniform:2", "sort:2", "tile:2", "tile:2/64", "tile:2+sr", "topk:0.1"])
def test_copies_stay_close(change):
    far = drift(change)
    assert far[19] < 1.1 * far[9] < 4


def test_copies_would_drift_away_by_what_is_refused():
    far = drift("tile:1")
    assert far[19] > 1.3 * far[9]


def test_without_a_colon_it_is_listed_among_those_there_are():
    with pytest.raises(ValueError, match=r"codecs: none, .*delta\(kmeans:2\)"):
        thinpipe.codec("delta:2")


@pytest.mark.parametrize(
    "use",
    [
        thinpipe.codec,
        thinpipe.ddp_state,
        lambda spec: parse_codecs(f"none,{spec}"),
    ],
    ids=["codec", "ddp", "bench"],
)
def test_outside_a_link_it_says_where_it_belongs(use):
    with pytest.raises(ValueError, match=r"delta\(uniform:2\) sends changes against copies .* here take uniform:2"):
        use("delta(uniform:2)")


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("none,sort:8", ["none", "sort:8"]),
        ("none, delta(kmeans:2,first=fp16),sort:8,", ["none", "delta(kmeans:2,first=fp16)", "sort:8"]),
        ("delta(kmeans:2),delta(kmeans:4,first=none)", ["delta(kmeans:2)", "delta(kmeans:4,first=none)"]),
        ("", []),
    ],
)
def test_lists_are_split_between_specs_only(text, specs):
    assert split_specs(text) == specs


def test_plans_take_it_forward():
    entry = {"forward": "delta(sort:2,first=fp16)", "backward": "sort:8,4"}
    assert expand_codecs([entry]) == [
        {"compress-forward": "delta(sort:1+1,first=fp16)", "compress-backward": backward}
        for backward in ("sort:6+2", "sort:3+1")
    ]
