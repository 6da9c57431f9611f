"""The record of a training run."""

import re
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from tests.lab.runs.made_run import make_end, make_epoch, make_plan, make_step, play, record_file
from thinpipe.cli.app import app
from thinpipe.lab.records.record import Record
from thinpipe.lab.records.step_times import StepTimes
from thinpipe.lab.runs.summary import run_step_times
from thinpipe.train.events import WorkerUse


def test_encoding_is_the_senders_and_the_rest_the_receivers():
    sent, received = (
        replace(
            make_end().links[0],
            source=source,
            target=1 - source,
            direction=direction,
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


def test_the_record_has_the_results(tmp_path, capsys):
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


def test_a_missing_metric_is_no_column_of_the_record(tmp_path):
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
