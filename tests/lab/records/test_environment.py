"""The driver's report of its GPUs, if there is a driver."""

import pytest

from thinpipe.lab.records.environment import gpu_topology


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('[ "$*" = "topo -m" ] && printf "\\n\\t\\033[4mGPU0\\033[0m\\nGPU0\\t X\\n\\n"', "\tGPU0\nGPU0\t X"),
        ("exit 9", None),
        (None, None),
    ],
    ids=["driver", "broken", "none"],
)
def test_topology(script, said, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}")
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpu_topology() == said
