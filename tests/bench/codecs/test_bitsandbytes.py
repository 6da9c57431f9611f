"""Quantizers of bitsandbytes keep the contract of codecs; without it they are one clear error."""

import pytest
import torch

from thinpipe.bench.codecs import bitsandbytes
from thinpipe.bench.codecs.figures import relative_squared_error
from thinpipe.bench.inputs import parse_codecs


def test_without_bitsandbytes_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(bitsandbytes, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"nf4 .*pip install 'thinpipe\[compare\]'"):
        parse_codecs("sort:8,nf4", outside=True)


def test_only_the_codec_benchmark_knows_them():
    with pytest.raises(ValueError, match="there is no codec 'nf4'"):
        parse_codecs("nf4")


@pytest.mark.parametrize(("name", "bits", "error"), [("nf4", 4.5, 0.01), ("int8-blockwise", 8.125, 0.0003)])
@pytest.mark.parametrize("shape", [(64, 768), (777,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back(name, bits, error, shape, dtype):
    pytest.importorskip("bitsandbytes")
    (codec,) = parse_codecs(f" {name}", outside=True)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wire = codec.encode(x)
    assert 8 * wire.numel() / x.numel() == pytest.approx(bits, rel=0.02)
    assert 0 < relative_squared_error(x, codec.decode(wire, torch.empty_like(x))) < error
