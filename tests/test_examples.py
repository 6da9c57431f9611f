"""The examples run as their first lines say: they learn, compress, and leave what they promise."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.scripts import ROOT, run_script

EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
FOUR = ("-m", "torch.distributed.run", "--nproc-per-node=4")
SIZES = r"(\d+) bytes of tensors, (\d+) on the wire"


@pytest.mark.parametrize(
    ("name", "launcher", "links", "ratio"),
    [
        ("compress_links", TORCHRUN, 4, (3.5, 4)),
        ("client_server", (), 6, (3.5, 4)),
        ("data_parallel", TORCHRUN, 1, (3.5, 4)),
        ("mesh", FOUR, 8, (3.5, 4)),
        ("mesh ddp", FOUR, 8, (3.5, 4)),
        ("own_codec", (), 1, (30, 32)),
    ],
)
def test_example_learns_and_compresses(
    name: str, launcher: tuple[str, ...], links: int, ratio: tuple[float, float], tmp_path: Path
) -> None:
    temporary = {"TMPDIR": str(tmp_path)} if launcher else {}  # torchrun leaves a folder
    script, *arguments = name.split()
    code, output = run_script(*launcher, str(EXAMPLES / f"{script}.py"), *arguments, **temporary)
    assert code == 0, output
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0], losses
    sizes = re.findall(SIZES, output)
    assert len(sizes) == links, output
    for tensor_bytes, wire_bytes in sizes:
        assert ratio[0] < int(tensor_bytes) / int(wire_bytes) < ratio[1]


def test_codecs_by_themselves_are_smaller_and_lose_something() -> None:
    code, output = run_script(str(EXAMPLES / "compress_a_tensor.py"))
    assert code == 0, output
    rows = {line.split()[0]: (int(line.split()[1]), float(line.split()[-1])) for line in output.splitlines()}
    whole, _ = rows.pop("none")
    assert len(rows) == 7
    for spec, (size, error) in rows.items():
        assert size <= whole / 2, spec
        assert 0 < error < 0.5, spec


def test_units_compute_the_same_as_the_model() -> None:
    code, output = run_script(str(EXAMPLES / "cut_a_model.py"))
    assert code == 0, output
    assert [line.split()[0] for line in output.splitlines()[:-1]] == ["HeadUnit", *["BlockUnit"] * 3, "TailUnit"]
    assert output.splitlines()[-1] == "largest difference to the whole model: 0.0e+00"


def test_trace_is_a_picture_and_a_chrome_trace_of_all_that_happens_in_a_step(tmp_path: Path) -> None:
    code, output = run_script(str(EXAMPLES / "trace_a_step.py"), str(tmp_path))
    assert code == 0, output
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    for kind in ("forward", "backward", "encode", "decode"):
        assert sum(name.startswith(f"{kind} ") for name in names) >= 8, kind  # two workers, four chunks


def test_a_task_of_ones_own_is_trained_saved_and_evaluated(tmp_path: Path) -> None:
    """own_task.py is no script: the command line imports it."""
    run, record = tmp_path / "run", tmp_path / "evaluation.json"
    train = ("-m", "thinpipe", "train", "--threads", "1")
    options = ("--task", "examples.own_task:OddOrEven", "--samples", "640", "--epochs", "2", "--save", str(run))
    code, output = run_script(*train, *options, "--steps", "10")
    assert code == 0, output
    assert "odd-or-even" in output
    code, output = run_script(*train, "--resume", str(run), "--steps", "20")  # knows the task
    assert code == 0, output
    code, output = run_script(
        "-m", "thinpipe", "evaluate", "--run", str(run / "best"), "--threads", "1", "--json", str(record)
    )
    assert code == 0, output
    (row,) = json.loads(record.read_text())["rows"]
    assert row["samples"] == 360  # every fifth of 1797
    assert row["accuracy"] > 0.8  # half of them are odd


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_short_and_shown(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert f"examples/{path.name}" in docstring, "an example begins with the command that runs it"
    assert f'"{path.stem}"' in Path(__file__).read_text() or path.name in Path(__file__).read_text()
