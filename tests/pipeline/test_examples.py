"""The examples run as their first lines say, learn, and compress."""

from __future__ import annotations

import re

import pytest

from tests.pipeline.test_launch import ROOT, run_script

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("command", "links"),
    [
        pytest.param(
            ["-m", "torch.distributed.run", "--nproc-per-node=2", str(EXAMPLES / "compress_links.py")],
            r"(\d+) bytes of tensors, (\d+) on the wire",
            id="compress_links",
        ),
        pytest.param([str(EXAMPLES / "client_server.py")], r": (\d+) bytes as (\d+)", id="client_server"),
    ],
)
def test_example_learns_and_compresses(command: list[str], links: str) -> None:
    code, output = run_script(*command)
    assert code == 0, output
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0], losses
    sizes = re.findall(links, output)
    assert len(sizes) in (4, 6)
    for tensor_bytes, wire_bytes in sizes:
        assert 3.5 < int(tensor_bytes) / int(wire_bytes) < 4
