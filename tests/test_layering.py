"""Rooms import only the rooms that docs/architecture.md lets them."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "thinpipe"

# Room -> the rooms of thinpipe it may import; a longer name is more specific and wins.
ALLOWED = {
    "thinpipe": {
        "thinpipe.codecs",
        "thinpipe.pipeline",
        "thinpipe.ddp",
        "thinpipe.engines.units",
        "thinpipe.workloads",
        "thinpipe.workers.errors",
        "thinpipe.workers.launch",
    },
    "thinpipe.version": set(),
    "thinpipe.options": set(),
    "thinpipe.__main__": {"thinpipe.cli", "thinpipe.workers.errors"},
    "thinpipe.cli": {"thinpipe.commands.help", "thinpipe.workers.forking"},
    "thinpipe.codecs": {"thinpipe.codecs"},
    "thinpipe.comm": {"thinpipe.comm"},
    "thinpipe.workers": {"thinpipe.comm", "thinpipe.workers", "thinpipe.measure.files", "thinpipe.measure.sanitize"},
    "thinpipe.pipeline": {
        "thinpipe.pipeline",
        "thinpipe.comm",
        "thinpipe.workers",
        "thinpipe.codecs.axes",
        "thinpipe.codecs.base",
        "thinpipe.codecs.integers",
        "thinpipe.codecs.normal",
        "thinpipe.codecs.principal",
        "thinpipe.codecs.recipes",
        "thinpipe.codecs.rounding",
        "thinpipe.codecs.spec",
    },
    "thinpipe.ddp": {
        "thinpipe.ddp",
        "thinpipe.codecs.base",
        "thinpipe.codecs.recipes",
        "thinpipe.codecs.rounding",
        "thinpipe.codecs.spec",
    },
    "thinpipe.measure": {"thinpipe.measure"},
    "thinpipe.models": {"thinpipe.models", "thinpipe.measure", "thinpipe.workers.signals", "thinpipe.codecs.rounding"},
    "thinpipe.workloads": {
        "thinpipe.workloads",
        "thinpipe.models",
        "thinpipe.measure.sizes",
        "thinpipe.measure.files",
    },
    "thinpipe.engines": {
        "thinpipe.engines",
        "thinpipe.comm",
        "thinpipe.models",
        "thinpipe.workloads.task",
        "thinpipe.workers",
        "thinpipe.pipeline",
        "thinpipe.ddp",
        "thinpipe.codecs.rounding",
        "thinpipe.codecs.spec",
        "thinpipe.measure.sanitize",
        "thinpipe.measure.sizes",
    },
    "thinpipe.training": {
        "thinpipe.training",
        "thinpipe.comm",
        "thinpipe.engines",
        "thinpipe.workloads",
        "thinpipe.models.adapters",
        "thinpipe.models.save",
        "thinpipe.models.saved_adapter",
        "thinpipe.models.weights",
        "thinpipe.workers",
        "thinpipe.pipeline",
        "thinpipe.ddp",
        "thinpipe.codecs.base",
        "thinpipe.codecs.recipes",
        "thinpipe.codecs.rounding",
        "thinpipe.codecs.spec",
        "thinpipe.measure",
    },
    "thinpipe.generation": {
        "thinpipe.generation",
        "thinpipe.comm",
        "thinpipe.training.running",
        "thinpipe.training.settings",
        "thinpipe.engines",
        "thinpipe.models",
        "thinpipe.pipeline",
        "thinpipe.workers",
        "thinpipe.codecs.base",
        "thinpipe.codecs.recipes",
        "thinpipe.codecs.rounding",
        "thinpipe.codecs.spec",
        "thinpipe.measure.files",
        "thinpipe.workloads.sources",
        "thinpipe.workloads.task",
    },
    "thinpipe.bench": {
        "thinpipe.bench",
        "thinpipe.comm",
        "thinpipe.engines",
        "thinpipe.codecs",
        "thinpipe.workers",
        "thinpipe.pipeline",
        "thinpipe.ddp",
        "thinpipe.measure",
        "thinpipe.models",
        "thinpipe.workloads",
    },
    "thinpipe.ablation": {
        "thinpipe.ablation",
        "thinpipe.training.running",
        "thinpipe.training.settings",
        "thinpipe.pipeline.links.spec",
        "thinpipe.workers.signals",
        "thinpipe.codecs.recipes",
        "thinpipe.codecs.spec",
        "thinpipe.measure",
    },
    "thinpipe.commands": {
        "thinpipe.commands",
        "thinpipe.ablation",
        "thinpipe.bench",
        "thinpipe.measure",
        "thinpipe.models",
        "thinpipe.codecs",
        "thinpipe.workers",
        "thinpipe.workloads",
        "thinpipe.engines",
        "thinpipe.generation",
        "thinpipe.pipeline.links.spec",
        "thinpipe.training",
    },
}
MODULES = sorted(PACKAGE.rglob("*.py"))
# What a training step calls, and on whom; None: on anything.
STEP_CALLS = {"backward": None, "zero_grad": None, "step": {"optimizer", "schedule", "trainer"}}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module)
    return {name for name in found if name.split(".")[0] == "thinpipe"}


def step_calls(source: str) -> list[str]:
    """The calls in a source that are parts of a training step, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STEP_CALLS:
            on = STEP_CALLS[node.func.attr]
            owner = getattr(node.func.value, "attr", getattr(node.func.value, "id", ""))
            if on is None or owner.lstrip("_") in on:
                found.append(f"line {node.lineno}: {ast.unparse(node.func)}(")
    return found


def is_within(name: str, room: str) -> bool:
    # The package itself is a room of one module, not of all.
    return name == room or (room != "thinpipe" and name.startswith(room + "."))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_stay_within_the_house(path):
    rooms = [room for room in ALLOWED if is_within(module_name(path), room)]
    assert rooms, f"{module_name(path)} is in no room: add it to docs/architecture.md and here"
    allowed = ALLOWED[max(rooms, key=len)] | {"thinpipe.version", "thinpipe.options"}
    for name in imports(path):
        assert any(is_within(name, room) for room in allowed), f"{module_name(path)} may not import {name}"


def test_the_check_sees_imports():
    assert sum(len(imports(path)) for path in MODULES) > 10


def test_one_room_trains():
    """A benchmark times the step that trains, because there is no other."""
    elsewhere = [
        f"{module_name(path)}, {call}"
        for path in MODULES
        if not is_within(module_name(path), "thinpipe.engines")
        for call in step_calls(path.read_text())
    ]
    assert not elsewhere, "\n".join(["a training step outside thinpipe.engines:", *elsewhere])


def test_the_check_sees_training_steps():
    source = (
        '"""x.backward()"""\nloss().backward()\nself._optimizer.step()\nschedule.step(x)\nusage.step(1)\nm.zero_grad()'
    )
    assert [call.split(": ")[1] for call in step_calls(source)] == [
        *("loss().backward(", "self._optimizer.step(", "schedule.step(", "m.zero_grad(")
    ]
    assert any(step_calls(path.read_text()) for path in (PACKAGE / "engines").glob("*.py"))
