"""delta(SPEC) as a spec: what parses, its canonical form, and the error where it does not belong."""

import pytest
import torch

import thinpipe
from thinpipe.codecs.spec import codec, split_specs
from thinpipe.lab.ablation.plan import expand_codecs
from thinpipe.lab.bench.inputs import parse_codecs
from thinpipe.links.delta import DEFAULT_FIRST
from thinpipe.links.link_codec import CodecAdapter
from thinpipe.links.registry import LINK_CODECS, link_codec
from thinpipe.links.slot import Route, Slot


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
    found = link_codec(written)
    assert found.spec == canonical
    assert link_codec(canonical).codecs == found.codecs


@pytest.mark.parametrize("spec", ["sort:6+2", thinpipe.codec("sort:8")])
def test_a_codec_sends_every_tensor(spec):
    assert link_codec(spec).spec == "sort:6+2"
    assert link_codec(spec).codecs == (thinpipe.codec("sort:8"),)
    assert link_codec(spec).evaluation_spec == "sort:6+2"


def test_tensors_sent_once_use_the_first_codec():
    assert link_codec("delta(tile:2)").evaluation_spec == DEFAULT_FIRST.spec
    assert link_codec("delta(tile:2,first=fp16)").evaluation_spec == "fp16"


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
def test_errors_of_invalid_specs_name_the_rule(spec, reason):
    with pytest.raises(ValueError, match="makes no sense") as error:
        link_codec(spec)
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


def test_codecs_whose_copies_would_drift_are_rejected():
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
def test_without_a_link_the_error_names_the_link(use):
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


@pytest.mark.parametrize(
    ("spec", "evaluation", "immediate", "needs_samples", "needs_basis"),
    [
        ("tile:4", "tile:4/256", "tile:4/256", False, False),
        ("delta(tile:2,first=fp16)", "fp16", "delta(tile:2/256,first=fp16)", True, False),
        ("axes:2", "axes:2", "axes:2+now", False, True),
        ("axes:2+now", "axes:2+now", "axes:2+now", False, True),
    ],
)
def test_a_link_codec_answers_for_itself(spec, evaluation, immediate, needs_samples, needs_basis):
    found = link_codec(spec)
    names = [found.evaluation_spec, found.immediate_spec]
    assert names == [link_codec(each).spec for each in (evaluation, immediate)]
    assert (found.needs_samples, found.needs_basis) == (needs_samples, needs_basis)


def test_a_further_link_codec_is_one_class_and_one_entry(monkeypatch):
    class Halved(CodecAdapter):
        """A link codec from outside, with the fewest methods: the defaults of the base class do the rest."""

        @classmethod
        def parse(cls, spec, *, samples, copies_in):
            return cls(codec(spec.partition(":")[2]))

        @property
        def spec(self):
            return f"halved:{super().spec}"

    monkeypatch.setitem(LINK_CODECS, "halved", Halved)
    found = link_codec(" halved:fp16 ")
    assert found.spec == found.evaluation_spec == found.immediate_spec == "halved:fp16"
    found.check_direction("backward")
    assert not found.needs_samples
    assert not found.needs_basis
    slot = Slot(torch.Size((64, 64)), torch.float32)
    found.attach(Route(0, 1, True, torch.device("cpu"), None))
    found.configure([slot], 2)
    found.begin_step(1, training=True)
    assert [each.wire_bytes for each in found.wire_formats(slot)] == [found.max_bytes(0)] == [2 * 64 * 64]
    wire, x = torch.empty(found.max_bytes(0), dtype=torch.uint8), torch.randn(64, 64)
    found.encode(0, 0, x, wire)
    out = torch.empty_like(x)
    found.decode(0, 0, wire, out)
    assert torch.equal(out, x.half().float())
    assert found.shared_state_dict() == {}
    assert found.reserved_bytes() == 0
    assert found.state_dict() == {"steps": torch.tensor(1)}
