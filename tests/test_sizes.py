"""Nothing is too long to be read at once: files, functions, parameters, layers. Names are used twice at most."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "thinpipe"


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def parameters(function: ast.FunctionDef) -> int:
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in given)


def is_kernel(path: Path) -> bool:
    return "kernels" in path.parts


def test_files() -> None:
    folders = ("thinpipe", "tests", "examples", "benchmarks")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    lines = {path: len(path.read_text().splitlines()) for path in paths}
    small = {PACKAGE / "pipeline", PACKAGE / "links"}
    limits = {path: 250 if path.parent in small else 400 for path in lines}
    assert [f"{path}: {lines[path]} lines" for path in lines if lines[path] > limits[path]] == []


def test_functions() -> None:
    long = [
        f"{path.name}: {function.name}"
        for path in PACKAGE.rglob("*.py")
        for function in functions(path)
        if not is_kernel(path) and (function.end_lineno or 0) - function.lineno >= 60
    ]
    assert long == []


def test_signatures() -> None:
    wide = [
        f"{path.name}: {function.name} has {parameters(function)}"
        for path in PACKAGE.rglob("*.py")
        for function in functions(path)
        if parameters(function) > (13 if is_kernel(path) else 8)
    ]
    assert wide == []


# Lines of each layer; a change that needs more says why and raises its number here.
# Included: encrypted links 2,300 (library), servers 2,620 and fine-tuning 830 (train), both together 400 (cli).
# `thinpipe plan` 2,320 (lab), 50 (cli), and its simulator of steps 190 (train).
# Recovery 1,950 (train).
# Adaptive bits 170 (library), 395 (train), 20 (lab).
BUDGETS = {"library": 19_450, "train": 22_285, "lab": 9_260, "cli": 2_460}


def layer(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "cli" if first == "__main__.py" else first if first in BUDGETS else "library"


def test_layers() -> None:
    lines = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        lines[layer(path)] += len(path.read_text().splitlines())
    assert lines.keys() == BUDGETS.keys()
    over = {name: (lines[name], limit) for name, limit in BUDGETS.items() if lines[name] > limit}
    assert over == {}, "lines, and the budget"


def test_names() -> None:
    """A third file or class of the same name sends a reader to the wrong one."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    files = Counter(path.name for path in paths)
    classes = Counter(
        node.name
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in (files + classes).items() if count > 2] == []
