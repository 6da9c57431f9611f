"""thinpipe bench pipeline as a program: every way to train, on real workers."""

import pytest
from typer.testing import CliRunner

from tests.plots import drawn, shown
from thinpipe.cli.app import app
from thinpipe.lab.netem.network import missing_for_networks
from thinpipe.lab.records.record import Record
from thinpipe.links.message import CHECKSUM_BYTES

HIDDEN, BATCH, CHUNKS = 64, 64, 4
TINY = ["--model", "mlp", "--hidden", str(HIDDEN), "--layers", "3", "--batch-size", str(BATCH), "--chunks", str(CHUNKS)]
QUICK = ["bench", "pipeline", *TINY, "--steps", "1", "--skip-steps", "1", "--threads", "1"]


def run(tmp_path, *arguments):
    result = CliRunner().invoke(app, [*QUICK, *arguments, "--json", str(tmp_path / "r.json")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result, Record.read(tmp_path / "r.json")


def test_pipelines_data_parallel_and_a_single_process(tmp_path):
    files = ["--markdown", str(tmp_path / "r.md"), "--plot", str(tmp_path / "r.png")]
    ways = ["--layout", "linear,client-server", "--schedule", "gpipe,1f1b", "--compress", "none,uniform:8"]
    with drawn() as figures:
        _, record = run(tmp_path, *ways, *files, "--baseline", "torch")
    assert [row["parallel"] for row in record.rows] == ["none", "data", *["pipeline"] * 12]
    tensor = BATCH * HIDDEN * 4  # a batch between two stages, and its gradient
    for row in record.rows:
        assert row["samples_per_s"] == pytest.approx(BATCH / row["step_ms"] * 1e3)
        assert row["bound_ms"] == row["busiest_compute_ms"] > 0
        if row["parallel"] != "pipeline":
            continue
        cuts = 1 if row["layout"] == "linear" else 2
        assert row["tensor_bytes"] == 2 * cuts * tensor
        assert row["busiest_wire_bytes"] == row["wire_bytes"] / 2
        assert row["stage"] == "torch" or row["of_torch"] > 0
        if row["stage"] == "torch":
            assert row["wire_bytes"] == row["tensor_bytes"]
        elif row["codec"] == "none":
            assert row["wire_bytes"] == row["tensor_bytes"] + 2 * cuts * row["chunks"] * CHECKSUM_BYTES
        else:
            assert row["wire_bytes"] < row["tensor_bytes"] / 3
            assert row["of_uncompressed"] > 0
        assert 0 < row["bubble_theory"] < 1
        assert row["of_data_parallel"] > 0
        assert [part["worker"] for part in row["per_worker"]] == [0, 1]
    assert "## To reproduce" in (tmp_path / "r.md").read_text()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    lines = shown(figures[0])["2 workers"]
    speeds = [row["samples_per_s"] for row in record.rows]
    assert (lines["single process"], lines["data-parallel"]) == ([(CHUNKS, speeds[0])], [(CHUNKS, speeds[1])])
    assert sorted(points for name, points in lines.items() if name.startswith("pipeline")) == sorted(
        [(CHUNKS, speed)] for speed in speeds[2:]
    )


def test_steps_are_timed_when_axes_are_known(tmp_path):
    """Not the first ones, at 8 bits."""
    _, record = run(tmp_path, "--workers", "2", "--parallel", "pipeline", "--compress", "2bit")
    (row,) = record.rows
    assert row["codec"] == "2bit"
    assert row["wire_bytes"] < 0.13 * row["tensor_bytes"]


@pytest.mark.skipif(missing_for_networks() is not None, reason=f"no {missing_for_networks()} here")
def test_a_step_over_a_slow_link_is_slower(tmp_path):
    options = ["--workers", "2", "--parallel", "pipeline", "--compress", "none", "--client-layers", "1,1"]
    _, record = run(tmp_path, *options, "--link", "1mbit")
    (row,) = record.rows
    assert row["busiest_wire_ms"] == row["busiest_wire_bytes"] * 8 / 1e3  # 1 Mbit/s
    assert row["step_ms"] > 0.8 * row["busiest_wire_ms"]  # 5 kB pass at once


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "two"], "--workers takes whole numbers"),
        (["--client-layers", "1"], "--client-layers is two numbers, as in 1,1; got 1"),
        (["--link", "fast"], "--link is a rate from 1kbit to 600gbit"),
        (["--json", "none/r.json"], "a directory that can be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = CliRunner().invoke(app, [*QUICK, *arguments])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line
