"""thinpipe diff, as a user meets it: the printed layout to the letter, exit codes, one-line errors."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from thinpipe.cli.app import app
from thinpipe.lab.bench.ddp.ddp_columns import COLUMNS as DDP_COLUMNS
from thinpipe.lab.bench.ddp.ddp_columns import KIND as DDP
from thinpipe.lab.bench.ddp.ddp_columns import ReplicaGroup, ReplicaTimes, make_row
from thinpipe.lab.records import report
from thinpipe.lab.records.diff import change_table, compare, fact_lines
from thinpipe.lab.records.record import FORMAT, Column, Record

GOLDEN = Path(__file__).parent / "golden"
COLUMNS = (
    Column(name="codec", heading="codec", key=True),
    Column(name="encode_ms", heading="encode\nms", format=".2f", better="lower"),
    Column(name="gb_per_s", heading="GB/s", format=".1f", better="higher"),
    Column(name="copy_ms", heading="copy\nms", format=".2f"),
)


def make(codecs, factor, repeat, cpu):
    rows = tuple(
        {"codec": codec, "encode_ms": 2.0 * factor, "gb_per_s": 8.0 / factor, "copy_ms": 1.0} for codec in codecs
    )
    environment = {"torch": "2.13.0", "cpu": cpu, "devices": [], "topology": "a\nb"}
    return Record(
        kind="bench codecs",
        config={"repeat": repeat, "command": ["thinpipe", str(repeat)]},
        columns=COLUMNS,
        rows=rows,
        environment=environment,
        thinpipe="0.1.0",
    )


@pytest.fixture
def files(tmp_path):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    make(["none", "sort:6+2", "kmeans:4"], 1.0, 20, "AMD EPYC 7B13 64-Core Processor").write(before)
    make(["sort:6+2", "none", "svd:14"], 1.25, 5, "AMD EPYC").write(after)
    return before, after


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["diff", *map(str, arguments)])


@pytest.mark.parametrize(
    ("name", "arguments", "exit_code"),
    [
        ("diff", [], 0),
        ("diff_columns", ["--columns", "copy_ms,encode_ms"], 0),
        ("diff_fail", ["--fail-above", "24.9%"], 1),
    ],
)
def test_prints_this_layout(name, arguments, exit_code, files):
    result = invoke(*files, *arguments)
    assert result.stderr == ""
    assert result.stdout == (GOLDEN / f"{name}.txt").read_text()
    assert result.exit_code == exit_code


def test_a_record_against_itself_is_all_zeros_and_passes(files):
    result = invoke(files[0], files[0], "--fail-above", "0%")
    assert result.exit_code == 0
    assert [line.split()[1:] for line in result.stdout.splitlines() if line.startswith(("none", "sort", "kmeans"))] == [
        ["0", "0"]
    ] * 3
    assert "* " not in result.stdout
    assert "only in" not in result.stdout


def test_a_terminal_gets_colours(files):
    diff = compare(*map(Record.read, files))
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard", highlight=False)
    report.show_lines(fact_lines(diff.facts), console)
    report.show([change_table(diff, values=False)], console)
    red, yellow = "\x1b[31m", "\x1b[1;33m"
    assert file.getvalue().count(f"{red}+25.0%") == 2  # times went up
    assert file.getvalue().count(f"{red}-20.0%") == 2  # speeds went down
    assert f"{yellow}* repeat:" in file.getvalue()


def test_keeps_page_and_record(files, tmp_path):
    result = invoke(*files, "--json", tmp_path / "d.json", "--markdown", tmp_path / "d.md")
    assert result.exit_code == 0
    assert Record.read(tmp_path / "d.json").kind == "diff of bench codecs"
    page = (tmp_path / "d.md").read_text()
    assert "| repeat | 20 | 5 | * |" in page
    assert "| sort:6+2 | +25.0% | -20.0% |" in page
    assert "only in the baseline: kmeans:4" in page


@pytest.mark.parametrize(
    ("test", "arguments", "message"),
    [
        ("none.json", [], "cannot be read"),
        ("text.json", [], "text.json cannot be read as a record"),
        ("list.json", [], "it has no format number"),
        ("cut.json", [], "cut.json cannot be read as a record"),
        ("newer.json", [], "upgrade thinpipe"),
        ("kind.json", [], "of one kind can be compared; got 'bench codecs' and 'bench link'"),
        ("before.json", ["--columns", "speed"], "got 'speed'"),
        ("before.json", ["--columns", ","], "got none"),
        ("before.json", ["--fail-above", "much"], "--fail-above takes a percentage"),
        ("before.json", ["--fail-above=-5%"], "--fail-above takes a percentage"),
        ("before.json", ["--json", "none/d.json"], "a directory that can be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.split()[0],
)
def test_incomparable_records_are_one_line_and_exit_code_2(test, arguments, message, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = json.loads(files[0].read_text())
    Path("text.json").write_text("no record")
    Path("list.json").write_text("[1]")
    Path("cut.json").write_text(files[0].read_text()[:-40])
    Path("newer.json").write_text(json.dumps(data | {"format": FORMAT + 1}))
    Path("kind.json").write_text(json.dumps(data | {"kind": "bench link"}))
    result = invoke("before.json", test, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("thinpipe: ")
    assert message in line


def test_iteration_times_are_compared_as_all_records(tmp_path):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    for path, seconds in ((before, 0.100), (after, 0.125)):
        sample = ReplicaTimes(samples_s=(seconds,), gradient_bytes=8, wire_bytes=None)
        rows = tuple(
            make_row("resnet50", ReplicaGroup(name=name, size=size, ddp=name != "no ddp"), 32, "cuda", [sample] * size)
            for name, size in (("no ddp", 1), ("1M/2G", 2))
        )
        Record(kind=DDP, config={}, columns=DDP_COLUMNS, rows=rows, environment={}).write(path)
    result = invoke(before, after, "--fail-above", "26%", "--markdown", tmp_path / "d.md")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("resnet50  ddp ")]
    assert line.split()[3:] == ["+25.0%", "-20.0%"] * 4  # sec/iter and ex/sec of four percentiles
    assert "PASS" in result.stdout
    assert result.exit_code == 0
    assert "| resnet50 | ddp | 2 | +25.0% | -20.0% |" in (tmp_path / "d.md").read_text()
    failed = invoke(before, after, "--fail-above", "24%")
    assert failed.exit_code == 1
    (check,) = [line for line in failed.stdout.splitlines() if line.startswith("FAIL")]
    assert " 25%" in check
    by_speed = invoke(before, after, "--columns", "p75_examples_per_s", "--fail-above", "21%")
    assert by_speed.exit_code == 0
    assert "-20.0%" in by_speed.stdout
