"""Link codecs by their specs: which there are, and the error where one does not belong."""

import pytest
import torch

import thinpipe
from thinpipe.codecs.spec import codec, split_specs
from thinpipe.lab.ablation.plan import expand_codecs
from thinpipe.lab.bench.inputs import parse_codecs
from thinpipe.links.link_codec import CodecAdapter
from thinpipe.links.registry import LINK_CODECS, link_codec
from thinpipe.links.slot import Route, Slot


@pytest.mark.parametrize("spec", ["sort:6+2", thinpipe.codec("sort:8")])
def test_a_codec_sends_every_tensor(spec):
    assert link_codec(spec).spec == "sort:6+2"
    assert link_codec(spec).codecs == (thinpipe.codec("sort:8"),)


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
    with pytest.raises(ValueError, match=r"axes:2 learns from what a link carries .* here take gauss:2"):
        use("axes:2")


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("none,sort:8", ["none", "sort:8"]),
        ("none, axes:2+now,sort:8,", ["none", "axes:2+now", "sort:8"]),
        ("", []),
    ],
)
def test_lists_are_split_between_specs_only(text, specs):
    assert split_specs(text) == specs


def test_plans_take_it_forward():
    entry = {"forward": "axes:2", "backward": "sort:8,4"}
    assert expand_codecs([entry]) == [
        {"compress-forward": "axes:2", "compress-backward": backward} for backward in ("sort:6+2", "sort:3+1")
    ]


@pytest.mark.parametrize(
    ("spec", "immediate", "needs_basis"),
    [("tile:4", "tile:4", False), ("axes:2", "axes:2+now", True), ("axes:2+now", "axes:2+now", True)],
)
def test_a_link_codec_answers_for_itself(spec, immediate, needs_basis):
    found = link_codec(spec)
    assert (found.immediate_spec, found.needs_basis) == (immediate, needs_basis)


def test_a_further_link_codec_is_one_class_and_one_entry(monkeypatch):
    class Halved(CodecAdapter):
        """A link codec from outside, with the fewest methods: the defaults of the base class do the rest."""

        @classmethod
        def parse(cls, spec):
            return cls(codec(spec.partition(":")[2]))

        @property
        def spec(self):
            return f"halved:{super().spec}"

    monkeypatch.setitem(LINK_CODECS, "halved", Halved)
    found = link_codec(" halved:fp16 ")
    assert found.spec == found.immediate_spec == "halved:fp16"
    found.check_direction("backward")
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
    assert found.state_dict() == {"steps": torch.tensor(1)}
