"""Terminal output of a training run: a bar, or plain lines in a pipe."""

import io
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from tests.lab.runs.made_run import EPOCHS, STEPS, make_plan, make_step, play
from thinpipe.cli.run_terminal import Terminal
from thinpipe.cli.terminal import duration
from thinpipe.lab.records.record import Record


def on_terminal(width, monkeypatch, parallel="pipeline"):
    """Return the bytes sent to a terminal of that width, and the same without control sequences."""
    file = io.StringIO()
    console = Console(file=file, width=width, height=50, force_terminal=True, highlight=False, legacy_windows=False)
    monkeypatch.setattr("thinpipe.cli.run_terminal.Console", lambda **_: console)
    play(Terminal(), parallel)
    return file.getvalue(), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())


def test_a_pipe_gets_plain_lines(capsys):
    play(Terminal(line_every_s=0))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\r" not in out
    lines = out.splitlines()
    assert max(map(len, lines[1:])) <= 80  # the first one names the machine
    assert [line for line in lines if "validation " in line and line.startswith("epoch")] == [
        "epoch 1/3  loss 1.2000  accuracy  50.0%  validation  60.0%  800/s  1.2 s",
        "epoch 2/3  loss 0.6000  accuracy  75.0%  validation  80.0%  800/s  1.2 s",
        "epoch 3/3  loss 0.4000  accuracy  83.3%  validation  86.7%  800/s  1.2 s",
    ]
    steps = [line for line in lines if "  step " in line]
    assert len(steps) == EPOCHS * STEPS
    # Means over the epoch so far: losses 2.4 and 1.2; 2 steps of 2 * (262400 + 82176) bytes.
    assert steps[1].startswith("epoch 1/3  step 2/12  loss 1.8000  acc 32.5%  800/s  1.4 MB  ")


def test_a_pipe_gets_few_lines_between_epochs(capsys):
    play(Terminal())
    assert "  step " not in capsys.readouterr().out


def test_steps_are_counted_to_the_requested_last_one(capsys):
    terminal = Terminal(line_every_s=0)
    terminal.planned(replace(make_plan(), last_step=4))
    terminal.stepped(make_step(1))
    terminal.stepped(make_step(4))
    steps = [line for line in capsys.readouterr().out.splitlines() if "  step " in line]
    assert steps[0].startswith("epoch 1/3  step 1/4  ")
    assert steps[1].endswith("  0:00 left")


@pytest.mark.parametrize("parallel", ["data", "none"])
def test_runs_without_links_have_tables_too(parallel, capsys):
    play(Terminal(), parallel)
    out = capsys.readouterr().out
    assert out.count("0-19 ConvLayer to Head   2,236,682  100.0%") == (2 if parallel == "data" else 1)
    assert "Traffic" not in out
    assert "encode" not in out
    assert "compute" in out
    assert ("8,946,728" in out) is (parallel == "data")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_gets_a_bar_and_nothing_wider_than_it(width, monkeypatch):
    raw, text = on_terminal(width, monkeypatch)
    assert max(len(line) for line in re.split(r"[\r\n]", text)) <= width
    assert ("━" in raw) is (width > 60)
    assert "acc" in text
    assert text.count("epoch 3/3  loss 0.4000") == 1
    hidden, shown = raw.rfind("\x1b[?25l"), raw.rfind("\x1b[?25h")
    assert shown > hidden  # the cursor is back


def test_a_killed_client_leaves_the_cursor(monkeypatch):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, legacy_windows=False)
    monkeypatch.setattr("thinpipe.cli.run_terminal.Console", lambda **_: console)
    terminal = Terminal()
    terminal.planned(make_plan())
    terminal.stepped(make_step(1))
    try:
        assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l")
    finally:
        terminal.failed(KeyboardInterrupt())


def test_notices_and_failed_saves_go_to_stderr(capsys):
    terminal = Terminal()
    terminal.noticed("step 8 is damaged")  # before there is a plan
    terminal.planned(make_plan())
    capsys.readouterr()
    terminal.save_failed(3, "worker 1: /run: No space left on device")
    terminal.saved(6, "run/step-6")
    terminal.save_failed(9, "worker 1: /run: No space left on device")
    assert capsys.readouterr().err.splitlines() == [
        "thinpipe: no checkpoint of step 3: worker 1: /run: No space left on device; there is none yet",
        "thinpipe: no checkpoint of step 9: worker 1: /run: No space left on device; the last one is run/step-6",
    ]


def test_a_failed_run_reports_its_last_step(capsys):
    terminal = Terminal()
    terminal.planned(make_plan())
    terminal.stepped(make_step(5))
    terminal.failed(KeyboardInterrupt())
    assert capsys.readouterr().err == "stopped after step 5 of 12\n"


def test_durations():
    assert [duration(seconds) for seconds in (0, 65.4, 7384)] == ["0:00", "1:05", "2:03:04"]


def test_a_closed_pipe_ends_the_output_and_not_the_run(tmp_path):
    path = tmp_path / "r.json"
    program = (
        "from tests.lab.runs.made_run import play\n"
        "from pathlib import Path\n"
        "from thinpipe.cli.train import listen\n"
        f"play(listen(None, Path({str(path)!r}), config={{}}, seed=0, forward='none', backward='none'))"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 0, done.stderr
    assert Record.read(path).rows
    assert done.stderr.splitlines() == [
        "thinpipe: Terminal stops, the run does not: [Errno 32] Broken pipe",
        f"wrote {path}",
    ]
