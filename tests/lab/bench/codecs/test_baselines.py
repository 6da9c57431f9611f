"""Guests of the codec benchmark: quantizers of bitsandbytes keep the contract, axes are learned from another tensor."""

import pytest
import torch
from safetensors.torch import save_file

from thinpipe.codecs import codec
from thinpipe.lab.bench.codecs import baselines
from thinpipe.lab.bench.codecs.baselines import OfflinePCA
from thinpipe.lab.bench.codecs.codec_columns import relative_squared_error
from thinpipe.lab.bench.codecs.codec_options import CodecBenchOptions
from thinpipe.lab.bench.codecs.measure import measure_codecs
from thinpipe.lab.bench.inputs import parse_codecs
from thinpipe.links.learned.row_layout import rows_of


def test_without_bitsandbytes_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"nf4 .*pip install 'thinpipe\[compare\]'"):
        parse_codecs("sort:8,nf4", baselines=True)


def test_only_the_codec_benchmark_knows_them():
    with pytest.raises(ValueError, match="there is no codec 'nf4'"):
        parse_codecs("nf4")


@pytest.mark.parametrize(("name", "bits", "error"), [("nf4", 4.5, 0.01), ("int8-blockwise", 8.125, 0.0003)])
@pytest.mark.parametrize("shape", [(64, 768), (777,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back(name, bits, error, shape, dtype):
    pytest.importorskip("bitsandbytes")
    (codec,) = parse_codecs(f" {name}", baselines=True)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wire = codec.encode(x)
    assert 8 * wire.numel() / x.numel() == pytest.approx(bits, rel=0.02)
    assert 0 < relative_squared_error(x, codec.decode(wire, torch.empty_like(x))) < error


def _captured(path, links=("0-1",), steps=(5, 10, 20)):
    """Tokens whose 64 values vary along few axes, other ones for every link."""
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for link in links:
        mix = torch.randn(8, 64, generator=draw)
        for step in steps:
            tokens = torch.randn(32, 64, 8, generator=draw) @ mix + 0.01 * torch.randn(32, 64, 64, generator=draw)
            tensors[f"forward/{link}/0/step{step:06}/chunk0"] = tokens
    save_file(tensors, path)
    return path


def test_every_step_is_measured_with_the_axes_of_the_one_before_on_its_link(tmp_path):
    settings = CodecBenchOptions(
        from_=_captured(tmp_path / "captured.safetensors", links=("0-1", "1-2")),
        compress="axes:1,tile:1,gauss:2",
        device="cpu",
        reference="none",
        repeat=1,
        budget=0.0,
    )
    rows = list(measure_codecs(settings.cases(), settings.codecs, settings))
    learned = {row["content"]: row for row in rows if row["codec"] == "axes:1"}
    places = [f"forward/{link}/0/step{step:06}/chunk0" for link in ("0-1", "1-2") for step in (10, 20)]
    assert sorted(learned) == places  # not the first steps: nothing was there to learn from
    others = [row for row in rows if row["codec"] == "gauss:2"]
    assert len(others) == 6
    # Axes of the other link, which has another mix, would lose more than half.
    assert max(row["relative_error"] for row in learned.values()) < 0.5 * min(row["relative_error"] for row in others)


def test_the_basis_is_counted_in_the_bytes():
    shape, axes = torch.Size([32, 64, 64]), OfflinePCA(2.0)
    rows = rows_of(shape, 2.0, 1)
    more = axes.wire_bytes(shape, torch.float32) - rows.wire_bytes(2.0)
    assert more == -(-rows.basis_bytes // rows.every(2.0, 1)) > 0


def test_made_tensors_are_measured_with_the_axes_of_another_draw():
    settings = CodecBenchOptions(
        shape=("16,64,64",),
        content=("outliers",),
        compress="axes:2",
        device="cpu",
        reference="none",
        repeat=1,
        budget=0,
    )
    (row,) = measure_codecs(settings.cases(), settings.codecs, settings)
    assert 0.001 < row["relative_error"] < 0.2


def test_a_tensor_without_rows_has_no_axes():
    settings = CodecBenchOptions(
        shape=("512",), compress="axes:2,tile:2", device="cpu", reference="none", repeat=1, budget=0
    )
    assert {row["codec"] for row in measure_codecs(settings.cases(), settings.codecs, settings)} == {"tile:2"}


def test_only_the_codec_benchmark_has_them_without_a_link():
    assert parse_codecs("axes:1.5,tile:4", baselines=True) == [OfflinePCA(1.5), codec("tile:4")]
    with pytest.raises(ValueError, match=r"axes:1.5 learns from what a link carries"):
        parse_codecs("axes:1.5")
    with pytest.raises(ValueError, match=r"'axes:9' makes no sense: 9 bits are not from 0.5 to 8"):
        parse_codecs("axes:9", baselines=True)
