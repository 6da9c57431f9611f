"""Layers: the library imports nothing of the trainer or the lab, the trainer nothing of the lab; also by string."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "thinpipe"

# Package or module -> what of thinpipe it may import; a longer name is more specific and wins.
_CODECS = {"thinpipe.codecs"}
_LINKS = {"thinpipe.links", "thinpipe.comm", "thinpipe.system", *_CODECS}
_PIPELINE = {"thinpipe.pipeline", *_LINKS}
_LIBRARY = {"thinpipe.ddp", "thinpipe.launch", *_PIPELINE}
_TRAINER = {"thinpipe.train", *_LIBRARY}
ALLOWED = {
    "thinpipe": _LIBRARY | {"thinpipe.train.engines.units", "thinpipe.train.tasks"},  # the public names
    "thinpipe.version": set(),
    "thinpipe.options": set(),
    "thinpipe.extras": set(),
    # library
    "thinpipe.system": {"thinpipe.system"},
    "thinpipe.comm": {"thinpipe.comm", "thinpipe.system"},
    "thinpipe.launch": {"thinpipe.launch", "thinpipe.comm", "thinpipe.pipeline.stage"},
    "thinpipe.codecs": {"thinpipe.system", *_CODECS},
    "thinpipe.links": _LINKS,
    "thinpipe.pipeline": _PIPELINE,
    "thinpipe.ddp": {"thinpipe.ddp", *_CODECS},
    # trainer
    "thinpipe.train": _TRAINER,
    "thinpipe.train.models": {"thinpipe.train.models", "thinpipe.comm.signals", "thinpipe.system", *_CODECS},
    "thinpipe.train.tasks": {
        "thinpipe.train.tasks",
        "thinpipe.train.models",
        "thinpipe.comm.membership",
        "thinpipe.system",
    },
    "thinpipe.train.engines": {
        "thinpipe.train.engines",
        "thinpipe.train.models",
        "thinpipe.train.shaping",
        "thinpipe.train.tasks.task",
        *_LIBRARY,
    },
    # The protocol of recovery does no I/O: the simulator drives all of it.
    "thinpipe.train.recovery.messages": {"thinpipe.system.sanitize"},
    "thinpipe.train.recovery.standing": {"thinpipe.train.recovery.messages"},
    "thinpipe.train.recovery.member": {"thinpipe.train.recovery.messages"},
    "thinpipe.train.recovery.coordinator": {"thinpipe.train.recovery.messages", "thinpipe.train.recovery.standing"},
    # lab
    "thinpipe.lab": {"thinpipe.lab", *_TRAINER},
    "thinpipe.lab.records": {"thinpipe.lab.records", "thinpipe.system"},
    "thinpipe.lab.netem": {"thinpipe.lab.netem", "thinpipe.comm", "thinpipe.train.shaping"},
    # command line
    "thinpipe.cli": {"thinpipe.cli", "thinpipe.lab", *_TRAINER},
    "thinpipe.cli.app": {"thinpipe.cli", "thinpipe.launch.forking", *_TRAINER},  # verbs and workers, by string
    "thinpipe.__main__": {"thinpipe.cli.app", "thinpipe.comm.errors"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))
_BY_STRING = re.compile(r"thinpipe(\.\w+)+(?=:\w+$|$)")
# Who communicates: all others go through thinpipe.comm. torch's stages and schedules only compute.
COMMUNICATES = ("thinpipe.comm", "thinpipe.links", "thinpipe.ddp")
PIPELINING = "torch.distributed.pipelining"
# What a training step calls, and on whom; None: on anything.
STEP_CALLS = {"backward": None, "zero_grad": None, "step": {"optimizer", "schedule", "trainer"}}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str) -> set[str]:
    """Return the modules of thinpipe that a source imports, those that it names in strings included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names if is_module(f"{node.module}.{alias.name}")}
            found.add(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (name := _BY_STRING.match(node.value)):
            found.add(name[0])
    return {name for name in found if is_module(name) and name != "thinpipe"}


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return name.split(".")[0] == "thinpipe" and (path.is_dir() or path.with_suffix(".py").is_file())


def distributed(source: str) -> list[str]:
    """Return what a source takes from torch.distributed: imports, those by string included, and attributes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found += [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
        elif isinstance(node, ast.Attribute):
            found.append(re.sub(r"^dist\.", "torch.distributed.", ast.unparse(node)))
    return sorted({name for name in found if re.match(r"torch\.distributed(\.|$)", name)})


def step_calls(source: str) -> list[str]:
    """Return the calls in a source that are parts of a training step, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STEP_CALLS:
            on = STEP_CALLS[node.func.attr]
            owner = getattr(node.func.value, "attr", getattr(node.func.value, "id", ""))
            if on is None or owner.lstrip("_") in on:
                found.append(f"line {node.lineno}: {ast.unparse(node.func)}(")
    return found


def is_within(name: str, package: str) -> bool:
    # The top package is one module here, not all of them.
    return name == package or (package != "thinpipe" and name.startswith(package + "."))


def forbidden(module: str, source: str) -> list[str]:
    """Return what a module imports and may not."""
    packages = [package for package in ALLOWED if is_within(module, package)]
    assert packages, f"{module} is in no layer: add its package to docs/architecture.md and here"
    allowed = ALLOWED[max(packages, key=len)] | {"thinpipe.version", "thinpipe.options", "thinpipe.extras"}
    # Packages themselves hold docstrings and lazy names: naming one on the way to a module is no import of all of it.
    names = {name for name in imports(source) if not any(other.startswith(f"{name}.") for other in imports(source))}
    return sorted(name for name in names if not any(is_within(name, package) for package in allowed))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down_the_layers(path):
    assert forbidden(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("thinpipe.codecs.tile", "from thinpipe.links.registry import link_codec", ["thinpipe.links.registry"]),
        ("thinpipe.pipeline.stage", "import thinpipe.train.loop", ["thinpipe.train.loop"]),
        ("thinpipe.train.loop", "from thinpipe.lab import records", ["thinpipe.lab.records"]),
        ("thinpipe.links.link", "import_module('thinpipe.train.worker')", ["thinpipe.train.worker"]),
        ("thinpipe.train.worker", "VERB = 'thinpipe.cli.train:train'", ["thinpipe.cli.train"]),
        ("thinpipe.lab.bench.models", "from thinpipe.train.loop import Loop", []),
    ],
)
def test_the_check_sees_imports(module, source, found):
    assert forbidden(module, source) == found


def test_only_engines_train():
    """A benchmark times the step that trains, because there is no other."""
    elsewhere = [
        f"{module_name(path)}, {call}"
        for path in MODULES
        if not is_within(module_name(path), "thinpipe.train.engines")
        for call in step_calls(path.read_text())
    ]
    assert not elsewhere, "\n".join(["a training step outside thinpipe.train.engines:", *elsewhere])


def test_the_check_sees_training_steps():
    source = (
        '"""x.backward()"""\nloss().backward()\nself._optimizer.step()\nschedule.step(x)\nusage.step(1)\nm.zero_grad()'
    )
    assert [call.split(": ")[1] for call in step_calls(source)] == [
        *("loss().backward(", "self._optimizer.step(", "schedule.step(", "m.zero_grad(")
    ]
    assert any(step_calls(path.read_text()) for path in (PACKAGE / "train" / "engines").glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_only_comm_and_links_communicate(path):
    """A backend that encrypts, reconnects or counts is one package's business."""
    module = module_name(path)
    if any(is_within(module, package) for package in COMMUNICATES):
        return
    names = distributed(path.read_text())
    if is_within(module, "thinpipe.pipeline"):
        names = [name for name in names if not is_within(name, PIPELINING)]
    assert names == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.distributed as dist", ["torch.distributed"]),
        ("from torch import distributed", ["torch.distributed"]),
        ("from torch.distributed import pipelining", [PIPELINING]),
        ("from torch.distributed.algorithms import join", ["torch.distributed.algorithms.join"]),
        ("importlib.import_module('torch.distributed.nn')", ["torch.distributed.nn"]),
        ("__import__('torch.distributed')", ["torch.distributed"]),
        ("if torch.distributed.is_initialized(): pass", ["torch.distributed", "torch.distributed.is_initialized"]),
        (
            "def f(group: dist.ProcessGroup): dist.barrier()",
            ["torch.distributed.ProcessGroup", "torch.distributed.barrier"],
        ),
        ("import torch.distributions", []),
        ('"""Built on torch.distributed."""', []),
    ],
)
def test_the_check_sees_communication(source, found):
    assert distributed(source) == found
    assert any(distributed(path.read_text()) for path in (PACKAGE / "comm").glob("*.py"))
