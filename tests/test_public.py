"""The names of `import thinpipe`: found by help and completion, typed, and used by the pages."""

from __future__ import annotations

import ast
import pydoc
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinpipe
from tests.documents import ROOT, blocks
from tests.pool import Pool

PACKAGE = ROOT / "thinpipe"


def test_names_are_listed_and_have_docstrings() -> None:
    assert dir(thinpipe) == sorted(thinpipe.__all__)
    overview = thinpipe.__doc__ or ""
    for name in set(thinpipe.__all__) - {"__version__"}:
        assert getattr(thinpipe, name).__doc__, name
        assert f" {name}" in overview, name
    with pytest.raises(AttributeError, match="no attribute 'Stage'"):
        thinpipe.Stage  # type: ignore[attr-defined]  # noqa: B018


def test_an_earlier_name_still_works() -> None:
    from thinpipe import Recipe, Task, TaskDefaults

    class Earlier(Task):
        recipe = Recipe(batch_size=2, chunks=1, epochs=1, optimizer="sgd", lr=0.1, lr_schedule="constant")

    assert Recipe is TaskDefaults
    assert Earlier.defaults is Earlier.recipe


def test_help_shows_every_name() -> None:
    text = pydoc.plain(pydoc.render_doc(thinpipe))
    for name in set(thinpipe.__all__) - {"__version__"}:
        assert f"\n    {name}(" in text or f"\n    class {name}(" in text, name


def test_type_checkers_see_every_name_and_no_others() -> None:
    """Names are imported where only a type checker looks, from the modules that they come from."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    seen = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imported = {name.name: node.module for node in seen.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert imported == {name: module for module, names in thinpipe._LAZY.items() for name in names}
    assert {*imported, "__version__"} == set(thinpipe.__all__)
    assert "__getattr__" not in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "py.typed" in packaged["thinpipe"]


def test_pages_and_examples_use_public_names() -> None:
    pages = [block.text for page in ROOT.glob("docs/*.md") for block in blocks(page) if block.language == "python"]
    sources = [*pages, *(path.read_text() for path in ROOT.glob("examples/*.py"))]
    modules = {
        node.module for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
    }
    assert not [module for module in modules if module and module.startswith("thinpipe.")]


def given(group: Any) -> dict[str, Any]:
    """Return the names that blocks of the pages use without defining them."""
    rank, size = group.rank(), group.size()
    torch.manual_seed(0)
    module = nn.Linear(256, 256)
    chunk = torch.zeros(8, 256, requires_grad=True)
    inputs, labels = torch.randn(64, 256), torch.randn(64, 256)
    return {
        **{"index": rank, "count": size, "rank": rank, "worker": rank, "workers": size, "device": torch.device("cpu")},
        **{"module": module, "chunk": chunk, "loss": nn.functional.mse_loss, "dataset": range(64)},
        **{"inputs": [inputs] if rank == 0 else [], "labels": labels if rank == size - 1 else None},
        **{"indices": torch.arange(64), "x": inputs, "y": labels},
    }


def run_pipeline(group: Any, first: str, second: str) -> tuple[float, float]:
    """Both blocks of the page about pipelines; the ratio of bytes of each."""
    names = given(group)
    exec(first, names)
    names["schedule"].step(*names["inputs"], target=names["labels"])
    plain = ratio(names["stage"].links)
    names |= {"model": nn.Sequential(*(nn.Linear(256, 256) for _ in range(7))), "example": None}
    exec(second if group.rank() == 0 else second.replace("schedule.step(x, target=y)", "schedule.step()"), names)
    return plain, ratio([link for stage in names["stages"] for link in stage.links])


def run_ddp(group: Any, first: str, second: str, folder: str) -> bool:
    names = given(group) | {"model": nn.Linear(256, 256)}
    exec(first, names)
    names["model"](names["x"]).square().mean().backward()
    exec(second.replace('f"checkpoint', f'f"{folder}/checkpoint'), names)
    return bool(names["state"].wire_bytes < names["state"].gradient_bytes)


def ratio(links: Any) -> float:
    counts = [link.counters() for link in links]
    return sum(count.tensor_bytes for count in counts) / sum(count.wire_bytes for count in counts)


def python_of(page: str) -> list[str]:
    return [block.text for block in blocks(ROOT / "docs" / page) if block.language == "python"]


def test_the_blocks_about_pipelines_train_and_compress(pool: Pool) -> None:
    first, second = python_of("pipeline.md")
    for plain, client_server in pool.run(run_pipeline, 4, first, second):
        assert plain > 3.5
        assert client_server > 3.5


def test_the_blocks_about_replicas_compress_and_resume(pool: Pool, tmp_path: Path) -> None:
    first, second, function = python_of("ddp.md")
    assert pool.run(run_ddp, 4, first, second, str(tmp_path)) == [True] * 4
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{rank}.pt" for rank in range(4)}
    ast.parse(function)  # its body is the reader's


def test_the_block_about_codecs_has_the_results_in_its_comments() -> None:
    (block,) = python_of("codecs.md")
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["wire"].numel() == names["size"]
