"""Extras: the library does without them, and a module of one that is missing is named with what to install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from thinpipe.extras import EXTRAS, missing_extra

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"scikit-learn": "sklearn", "pyyaml": "yaml"}  # distributions with another name than their module
# Stands in for an environment without extras: none of their modules can be imported.
WITHOUT = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(each for modules in EXTRAS.values() for each in modules)}:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_modules_are_those_of_the_project(extra: str) -> None:
    brought = [each.partition(">")[0] for each in PROJECT["optional-dependencies"][extra] if "[" not in each]
    assert sorted(MODULES.get(each, each) for each in brought) == sorted(EXTRAS[extra])


def test_the_library_needs_no_extra() -> None:
    ended = run(
        "import torch, thinpipe\n"
        "x = torch.randn(64, 64)\n"
        "codec = thinpipe.codec('tile:8')\n"
        "print((codec.decode(codec.encode(x), torch.empty_like(x)) - x).abs().max() < 0.05)\n"
        "print(thinpipe.PipelineStage.__name__, thinpipe.ddp_hook.__name__, thinpipe.run_workers.__name__)"
    )
    assert ended.stdout == "tensor(True)\nPipelineStage ddp_hook run_workers\n", ended.stderr


def test_a_missing_extra_is_named_in_one_line() -> None:
    ended = run("import sys\nfrom thinpipe.__main__ import main\nsys.argv = ['thinpipe', 'train']\nmain()")
    line = "thinpipe: this needs typer, which is not installed: pip install 'thinpipe[train]'\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


def test_a_module_of_no_extra_is_an_ordinary_import_error() -> None:
    assert missing_extra(ModuleNotFoundError("No module named 'nope'", name="nope")) is None
