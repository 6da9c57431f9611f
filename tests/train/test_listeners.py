"""Listeners of a training run: curves, and several listeners as one."""

import pickle
import re
from dataclasses import replace
from functools import partial

import pytest

from tests.lab.runs.made_run import (
    EPOCHS,
    SETTINGS,
    STEPS,
    make_end,
    make_epoch,
    make_plan,
    make_step,
    play,
    record_file,
)
from thinpipe.cli.run_terminal import Terminal
from thinpipe.cli.train import listen
from thinpipe.lab.records.record import Record
from thinpipe.system.files import OutputError
from thinpipe.train.events import Listeners
from thinpipe.train.listeners import Curves


@pytest.mark.parametrize("listener", [Terminal, lambda: Curves("none"), lambda: record_file("none")])
def test_a_run_may_fail_before_there_is_a_plan(listener, capsys):
    listener().failed(ValueError("no data"))
    assert capsys.readouterr() == ("", "")


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


def test_texts_are_reported_in_perplexity_and_bits_per_byte(tmp_path, capsys):
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


def test_all_requested_steps_can_be_sent_to_the_client(tmp_path, capsys):
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


def test_curves_that_cannot_be_written_are_an_error_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Listeners([Curves(tmp_path / "file" / "logs")]).planned(make_plan())


def test_an_unwritable_record_is_an_error_after_all_listeners_were_called(tmp_path, capsys):
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
