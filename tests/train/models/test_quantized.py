"""4-bit layers: against bitsandbytes' own, what a run with them holds, saves and exports, and the error without it."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.pool import Pool
from tests.train.test_activation_cache import home, losses, trained  # noqa: F401
from tests.train.test_export import export
from tests.train.test_lora import logits_of, saved_names
from thinpipe.options import OptionError
from thinpipe.train.models import quantized
from thinpipe.train.running import RunOptions

needs = pytest.mark.skipif(util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
GIVEN: dict[str, Any] = {"quantize": "nf4", "epochs": 2, "lr": 0.02}


def test_without_bitsandbytes_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"nf4 needs bitsandbytes, .*: pip install 'thinpipe\[nf4\]'"):
        quantized.check_installed()


@needs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_what_that_of_bitsandbytes_does(dtype: torch.dtype) -> None:
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    plain = nn.Linear(128, 192, dtype=dtype).requires_grad_(False)
    theirs = Linear4bit(128, 192, compute_dtype=dtype, compress_statistics=False, quant_type="nf4")
    theirs.load_state_dict({name: each.clone() for name, each in plain.state_dict().items()})
    theirs = theirs.to("cpu")  # quantizes
    block = nn.Sequential(plain)
    saved = quantized.saved_bytes([block])
    quantized.quantize(block)
    x = torch.randn(4, 5, 128, dtype=dtype)
    outcomes = []
    for layer in (block, theirs):
        given = x.clone().requires_grad_()
        output = layer(given)
        output.square().sum().backward()
        outcomes.append((output.detach(), given.grad))
    for ours, other in zip(*outcomes, strict=True):
        rounded = dtype == torch.bfloat16  # before or after the bias is added
        torch.testing.assert_close(ours, other, rtol=2e-2 if rounded else 1e-5, atol=5e-2 if rounded else 1e-4)
    assert (outcomes[0][0] - plain(x)).abs().max() > 1e-3
    held = sum(each.nbytes for each in block.parameters()) - plain.bias.nbytes
    assert held == 128 * 192 * (0.5 + 4 / 64) == plain.weight.nbytes - saved


@needs
def test_a_run_is_exported_merged_into_the_weights_that_it_was_trained_with(
    pool: Pool,
    home: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    running = RunOptions(save=tmp_path / "run", export=tmp_path / "merged", merge=True)
    found = pool.run(trained, 3, home, running, GIVEN | {"dtype": "bfloat16"})[0]
    plain = pool.run(trained, 3, home, RunOptions(), GIVEN | {"dtype": "bfloat16", "quantize": None})[0]
    assert losses(found) != losses(plain)
    assert losses(found) == pytest.approx(losses(plain), abs=0.05)
    assert not [name for name in saved_names(tmp_path / "run") if "absmax" in name or "base_layer" in name]
    merged, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", home / "model"))
    assert {each.dtype for each in merged.values()} == {torch.bfloat16}
    assert merged.keys() == before.keys()
    name = "model.layers.1.mlp.up_proj.weight"  # without an adapter: the dequantized weight
    assert 0.01 < (merged[name].float() - before[name]).norm() / before[name].norm() < 0.15
    assert len(merged[name].unique()) < before[name].numel() / 2
    done = export(tmp_path / "run", tmp_path / "later", "--merge")
    assert done.exit_code == 0, done.output
    torch.testing.assert_close(logits_of(tmp_path / "later"), logits_of(tmp_path / "merged"), rtol=0.02, atol=0.02)
