"""What those who watch a run make of it: the terminal, the curves, the record."""

import io
import os
import pickle
import re
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.cli.made_run import EPOCHS, STEPS, make_end, make_epoch, make_plan, make_step, play
from thinpipe.cli.app import app
from thinpipe.cli.run_terminal import Terminal
from thinpipe.cli.terminal import duration
from thinpipe.cli.train import listen
from thinpipe.lab.records import report
from thinpipe.lab.records.record import Record
from thinpipe.lab.records.step_times import StepTimes
from thinpipe.lab.runs.summary import RecordFile, run_step_times
from thinpipe.lab.runs.tables import end_tables, plan_tables
from thinpipe.system.files import OutputError
from thinpipe.train.events import LinkUse, WorkerUse
from thinpipe.train.listeners import Curves, Listeners

SETTINGS = {
    "config": {"command": ["thinpipe", "train"], "threads": None},
    "seed": 3,
    "forward": "sort:6+2",
    "backward": "none",
}


def record_file(path, **changes):
    return RecordFile(path, **SETTINGS | changes)


def on_terminal(width, monkeypatch, parallel="pipeline"):
    """What a terminal of that width was sent, and that without its control sequences."""
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


def test_steps_are_counted_to_where_the_run_was_told_to_stop(capsys):
    terminal = Terminal(line_every_s=0)
    terminal.planned(replace(make_plan(), last_step=4))
    terminal.stepped(make_step(1))
    terminal.stepped(make_step(4))
    steps = [line for line in capsys.readouterr().out.splitlines() if "  step " in line]
    assert steps[0].startswith("epoch 1/3  step 1/4  ")
    assert steps[1].endswith("  0:00 left")


def test_the_plan_says_who_holds_what_and_what_travels():
    held, links = (report.plain_text(table) for table in plan_tables(make_plan()))
    assert "1      1          1-18 Stem to Residual   2,222,944  99.4%" in held
    assert "2      0, client  19 Head                    12,810   0.6%" in held
    assert "1 to 2  forward    sort:6+2   8x320x2x2    327.7   82.2  0.251" in links
    assert "2 to 1  backward   sort:6+2   8x320x2x2    327.7   82.2  0.251" in links


def test_the_plan_says_what_delta_sends_while_samples_are_new():
    plan = make_plan()
    first, *rest = plan.links
    delta = replace(first, spec="delta(sort:2)", wire_bytes=65_536, first_wire_bytes=262_144)
    links = report.plain_text(plan_tables(replace(plan, links=(delta, *rest)))[1])
    assert "delta(sort:2): 262.1 kB a step forward while samples are new, 65.5 kB after that." in links


def test_the_plan_says_that_masks_may_need_less():
    plan = make_plan()
    first, *rest = plan.links
    links = report.plain_text(plan_tables(replace(plan, links=(replace(first, integer_bytes=8200), *rest)))[1])
    assert "At most: 8.2 kB of it are masks or other integers, sent in as few bits as they need." in links
    assert "At most" not in report.plain_text(plan_tables(plan)[1])


def test_the_plan_says_which_gradients_are_not_needed() -> None:
    plan = make_plan()
    assert "trained" not in "".join(report.plain_text(table) for table in plan_tables(plan))
    client, *rest = plan.holdings
    silent = tuple(link for link in plan.links if (link.source, link.target) != (1, 0))
    frozen = replace(
        plan, trained=plan.trained - client.trained, holdings=(replace(client, trained=0), *rest), links=silent
    )
    held, links = (report.plain_text(table) for table in plan_tables(frozen))
    assert "2,236,682 parameters, 2,235,754 of them trained" in held
    assert "No gradients from stage 1 to 0: nothing that they would reach is trained." in links


def test_the_end_says_where_the_time_went():
    result, links, times = (report.plain_text(table) for table in end_tables(make_plan(), make_end(), 12 * 689152))
    assert "digits     86.7%  87.1%      0.3330  0.4000        802      3.9     689,152" in result
    assert "all     backward              1376.3  344.6  0.250" in links
    # The client encodes what leaves stages 0 and 2, and waits for what comes to them: 10 ms per target's number.
    assert "0, client     20.0     4.0  20.0       1.0     2.0   410" in times
    assert "1             50.0     4.0  20.0       1.0     2.0   411" in times


def test_encoding_is_the_senders_and_the_rest_the_receivers():
    sent, received = (
        LinkUse(
            source=source,
            target=1 - source,
            direction=direction,
            spec="none",
            encode_ms=1.0 * k,
            wait_ms=10.0 * k,
            transfer_ms=100.0 * k,
            decode_ms=1000.0 * k,
        )
        for source, direction, k in ((0, "forward", 2), (1, "backward", 4))
    )
    worker = WorkerUse(worker=0, stages=(0,), compute_ms=6.0, peak_mib=1.0)
    parts = run_step_times(replace(make_end(), steps=2, workers=(worker,), links=(sent, received)), worker)
    assert parts == StepTimes(compute_ms=3.0, encode_ms=1.0, wait_ms=20.0, transfer_ms=200.0, decode_ms=2000.0)


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


def test_what_a_user_should_know_and_saves_that_failed_go_to_stderr(capsys):
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


def test_a_failed_run_says_where_it_got_to(capsys):
    terminal = Terminal()
    terminal.planned(make_plan())
    terminal.stepped(make_step(5))
    terminal.failed(KeyboardInterrupt())
    assert capsys.readouterr().err == "stopped after step 5 of 12\n"


@pytest.mark.parametrize("listener", [Terminal, lambda: Curves("none"), lambda: record_file("none")])
def test_a_run_may_fail_before_there_is_a_plan(listener, capsys):
    listener().failed(ValueError("no data"))
    assert capsys.readouterr() == ("", "")


def test_durations():
    assert [duration(seconds) for seconds in (0, 65.4, 7384)] == ["0:00", "1:05", "2:03:04"]


def read_curves(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_curves_have_every_step_and_epoch(tmp_path):
    play(Curves(tmp_path))
    curves = read_curves(tmp_path)
    per_step = {"train/loss", "train/accuracy", "train/lr", "train/gradient_norm", "wire/bytes", "speed/samples_per_s"}
    assert curves.keys() == per_step | {"validation/loss", "validation/accuracy"}
    for name in per_step:
        assert [step for step, _ in curves[name]] == list(range(1, EPOCHS * STEPS + 1)), name
    assert curves["train/loss"] == [(step, pytest.approx(2.4 / step)) for step in range(1, 13)]
    assert curves["speed/samples_per_s"][0] == (1, pytest.approx(800))
    assert curves["validation/accuracy"] == [(4 * i, pytest.approx(1 - 0.4 / i)) for i in (1, 2, 3)]


def test_curves_of_a_resumed_run_have_every_step_once(tmp_path):
    broken_off = Curves(tmp_path)
    broken_off.planned(make_plan())
    for step in range(1, 7):
        broken_off.stepped(make_step(step))
    broken_off.failed(KeyboardInterrupt())
    play(Curves(tmp_path), first_step=4)
    assert [step for step, _ in read_curves(tmp_path)["train/loss"]] == list(range(1, 13))


def test_the_record_has_what_came_out(tmp_path, capsys):
    play(record_file(tmp_path / "r.json"))
    assert capsys.readouterr().err == f"wrote {tmp_path / 'r.json'}\n"
    record = Record.read(tmp_path / "r.json")
    (row,) = record.rows
    assert record.kind == "train"
    assert record.config == {"command": ["thinpipe", "train"]}
    expected = {
        "task": "digits",
        "parallel": "pipeline",
        "forward": "sort:6+2",
        "backward": "none",
        "seed": 3,
        "metric_name": "accuracy",
        "metric": 0.867,
        "samples_per_s": 801.5,
        "seconds": 3.9,
        "wire_bytes_per_step": 689152,
        "tensor_bytes_per_step": 2752512,
        "wire_mb_per_epoch": pytest.approx(2.756608),  # of four steps
        "wire_ratio": pytest.approx(0.2504, abs=1e-4),
        "peak_mib": 411,
        "compute_ms_per_step": 70,
        "encode_ms_per_step": 8,
        "first_step": 0,
        "parameters_sha256": "c0ffee",
    }
    assert {name: row[name] for name in expected} == expected
    assert row["epochs"] == [asdict(make_epoch(epoch)) for epoch in (1, 2, 3)]
    assert len(row["links"]) == 4
    assert len(row["workers"]) == 2
    assert {column.name for column in record.columns} <= row.keys()


def test_a_figure_that_a_run_does_not_have_is_no_column_of_its_record(tmp_path):
    play(record_file(tmp_path / "linked.json"))
    play(record_file(tmp_path / "alone.json"), "none")
    linked, alone = (Record.read(tmp_path / f"{name}.json") for name in ("linked", "alone"))
    only_linked = {column.name for column in linked.columns} - {column.name for column in alone.columns}
    assert {"wire_ratio", "wire_bytes_per_step", "encode_ms_per_step"} < only_linked
    assert {alone.rows[0][name] for name in only_linked} == {None}
    assert {"bits_per_byte", "tokens_per_s"}.isdisjoint(column.name for column in linked.columns)
    files = [f"{tmp_path}/linked.json", f"{tmp_path}/alone.json"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["diff", *files, "--fail-above", "5%"])
    assert "only in the baseline: column wire_ratio" in result.stdout
    assert result.exit_code == 0, result.output


def test_texts_are_told_in_perplexity_and_bits_per_byte(tmp_path, capsys):
    listeners = Listeners([Terminal(), Curves(tmp_path / "logs"), record_file(tmp_path / "r.json")])
    listeners.planned(replace(make_plan(metric="perplexity"), tokens=128))
    listeners.stepped(make_step(1))
    listeners.evaluated(replace(make_epoch(1), validation_metric=12.345, bits_per_byte=0.9876))
    listeners.finished(replace(make_end(steps=1), metric=12.345, bits_per_byte=0.9876))
    output = capsys.readouterr().out
    assert "loss 1.2000  perplexity 12.35  0.988 bits/byte  800/s" in output
    assert re.search(r"byte +loss", output), "a column of the result"
    assert re.search(r"samples/s +tokens/s", output)
    assert read_curves(tmp_path / "logs")["validation/bits_per_byte"] == [(STEPS, pytest.approx(0.9876))]
    record = Record.read(tmp_path / "r.json")
    better = {column.name: column.better for column in record.columns}
    assert better["metric"] == better["best_metric"] == better["bits_per_byte"] == "lower"
    assert record.rows[0]["bits_per_byte"] == record.rows[0]["epochs"][0]["bits_per_byte"] == 0.9876
    assert record.rows[0]["tokens_per_s"] == 801.5 * 128
    assert better["tokens_per_s"] == "higher"


@pytest.mark.parametrize("metric", ["accuracy", "matthews", "perplexity"])
def test_records_of_other_codecs_can_be_compared(metric, tmp_path):
    for name, spec in (("a", "none"), ("b", "sort:6+2")):
        listener = record_file(tmp_path / f"{name}.json", config={"compress_forward": spec}, forward=spec)
        listener.planned(make_plan(metric=metric))
        listener.stepped(make_step(1, wire_bytes=400 if spec == "none" else 100))
        listener.finished(make_end(steps=1))
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["diff", f"{tmp_path}/a.json", f"{tmp_path}/b.json"])
    assert result.exit_code == 0, result.output
    assert re.search(r"\* compress_forward: +none +vs +sort:6\+2", result.stdout)
    assert "-75.0%" in result.stdout
    assert metric in result.stdout


def test_a_run_that_fails_leaves_no_record(tmp_path):
    listener = record_file(tmp_path / "r.json")
    listener.planned(make_plan())
    listener.stepped(make_step(1))
    listener.failed(KeyboardInterrupt())
    assert list(tmp_path.iterdir()) == []


def test_all_that_were_asked_for_can_be_sent_to_the_client(tmp_path, capsys):
    make = partial(listen, tmp_path / "logs", tmp_path / "r.json", **SETTINGS)
    play(pickle.loads(pickle.dumps(make))())
    assert len(read_curves(tmp_path / "logs")["train/loss"]) == 12
    assert Record.read(tmp_path / "r.json").rows[0]["seed"] == 3
    assert "Result" in capsys.readouterr().out


class Full(Terminal):
    """A listener whose disk is full from its second step on."""

    def stepped(self, step):
        if step.step > 1:
            raise OSError(28, "No space left on device")


def test_a_full_disk_in_the_middle_ends_the_listener_and_not_the_run(tmp_path, capsys):
    play(Listeners([Full(), record_file(tmp_path / "r.json")]))
    assert Record.read(tmp_path / "r.json").rows
    err = capsys.readouterr().err
    assert err.count("Full stops, the run does not") == 1
    assert "No space left on device" in err


def test_nobody_reading_the_pipe_ends_the_terminal_and_not_the_run(tmp_path):
    path = tmp_path / "r.json"
    program = (
        "from tests.cli.made_run import play\n"
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


def test_curves_that_cannot_be_written_are_an_error_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Listeners([Curves(tmp_path / "file" / "logs")]).planned(make_plan())


def test_a_record_that_cannot_be_written_is_an_error_after_all_were_told(tmp_path, capsys):
    gone, kept = record_file(tmp_path / "gone" / "r.json"), record_file(tmp_path / "r.json")
    with pytest.raises(OutputError, match=r"gone/r.json cannot be written: No such file .*; the record is on stdout"):
        play(Listeners([gone, kept]))
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"wrote {tmp_path / 'r.json'}"]
    (tmp_path / "copied.json").write_text(said.out)
    assert Record.read(tmp_path / "copied.json").rows == Record.read(tmp_path / "r.json").rows


def test_a_bug_in_a_listener_is_not_hidden():
    class Broken(Terminal):
        def stepped(self, step):
            raise TypeError("bug")

    with pytest.raises(TypeError, match="bug"):
        play(Listeners([Broken()]))
