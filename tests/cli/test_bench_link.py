"""thinpipe bench link as a program: real messages, late senders, files."""

import pytest
from typer.testing import CliRunner

from tests.plots import drawn, shown
from tests.scripts import run_script
from thinpipe.cli.app import app
from thinpipe.lab.netem.network import missing_for_networks
from thinpipe.lab.records.record import Record
from thinpipe.links.message import CHECKSUM_BYTES
from thinpipe.train.shaping import parse_link

needs_namespaces = pytest.mark.skipif(missing_for_networks() is not None, reason=f"no {missing_for_networks()} here")
SIZE, MBIT_PER_S, LATE_S = 250_000, 20, 0.3


def run(tmp_path, *arguments):
    result = CliRunner().invoke(
        app, ["bench", "link", "--probe", "0.1", *arguments, "--json", str(tmp_path / "r.json")], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result, Record.read(tmp_path / "r.json")


def test_every_size_and_codec_is_sent_and_recorded(tmp_path):
    files = ["--markdown", str(tmp_path / "r.md"), "--plot", str(tmp_path / "r.png")]
    with drawn() as figures:
        result, record = run(tmp_path, "--sizes", "1kB,100kB", "--compress", "uniform:8", "--repeat", "3", *files)
    rows = {(row["codec"], row["ways"], row["tensor_bytes"]): row for row in record.rows}
    assert len(rows) == len(record.rows) == 8
    assert all(row["messages"] == (6 if row["ways"] == "both ways" else 3) for row in record.rows)
    assert rows["none", "one way", 100_000]["wire_bytes"] == 100_000 + CHECKSUM_BYTES
    assert 25_000 <= rows["uniform:8", "both ways", 100_000]["wire_bytes"] < 26_000
    assert rows["uniform:8", "one way", 1_000]["wire_bytes"] == 1_000 + CHECKSUM_BYTES  # too small to be worth it
    assert rows["uniform:8", "one way", 100_000]["pays_below_mbit_per_s"] > 0
    assert all(0 < row["p50_ms"] <= row["p95_ms"] for row in record.rows)
    assert "pays below" in result.stdout
    page = (tmp_path / "r.md").read_text()
    assert all(f"## {part}" in page for part in ("Result", "Environment", "To reproduce"))
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    for ways in ("one way", "both ways"):
        lines = shown(figures[0])[f"not shaped, {ways}"]
        for codec in ("none", "uniform:8"):
            of_codec = [rows[codec, ways, size] for size in (1_000, 100_000)]
            assert lines[codec] == sorted((row["wire_bytes"], row["p50_ms"]) for row in of_codec)


@needs_namespaces
@pytest.mark.rate
def test_a_late_sender_changes_recv_time_and_not_the_transfer(tmp_path):
    options = ["--sizes", f"{SIZE}B", "--link", f"{MBIT_PER_S}mbit", "--repeat", "3", "--probe", "0"]
    rows = []
    for late_s in (0.0, LATE_S):
        _, record = run(tmp_path, *options, "--sender-delay", str(late_s))
        rows.append(next(row for row in record.rows if row["ways"] == "one way"))
    on_time, late = rows
    wire_ms = SIZE * 8 / MBIT_PER_S / 1e3  # 100 ms; what a busy machine adds is far less than half of it
    assert on_time["p50_ms"] > 0.95 * wire_ms
    assert on_time["recv_gb_per_s"] == pytest.approx(on_time["gb_per_s"], rel=0.5)
    assert late["gb_per_s"] == pytest.approx(on_time["gb_per_s"], rel=0.5)
    assert late["recv_ms"] - late["p50_ms"] == pytest.approx(LATE_S * 1e3, rel=0.25)
    assert late["recv_gb_per_s"] < on_time["recv_gb_per_s"] / 2


@pytest.mark.skipif(missing_for_networks(parse_link("1ms")) is not None, reason="no root or no /dev/net/tun here")
@pytest.mark.rate
def test_a_link_with_delay_and_two_rates_is_measured(tmp_path):
    """Machines that are busy make a round trip longer and a rate lower, never the other way."""
    options = ("--link", "20mbit/5mbit,15ms", "--sizes", "1kB,50kB", "--repeat", "3", "--probe", "1")
    result, record = run(tmp_path, *options)
    rows = {(row["ways"], row["tensor_bytes"]): row for row in record.rows}
    assert {ways for ways, _ in rows} == {"one way", "both, up", "both, down"}
    row = rows["one way", 50_000]
    assert record.config["links"] == [row["link"]] == ["20mbit/5mbit,15ms"]
    assert (row["nominal_mbit_per_s"], rows["both, down", 1_000]["nominal_mbit_per_s"]) == (5, 20)
    assert row["round_trip_ms"] > 29.5
    assert 0.5 < row["up_mbit_per_s"] < 5.5
    assert row["up_mbit_per_s"] < row["down_mbit_per_s"] < 22
    assert row["packets"] > 100
    assert row["p50_ms"] > 0.9 * (15 + 50_000 * 8 / 5e3)
    assert row["chunks_to_hide"] >= 2
    assert "Links" in result.stdout


def test_joins_under_torchrun_and_one_worker_prints(tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "thinpipe", "bench", "link", "--probe", "0"]
    sizes = ["--sizes", "1kB", "--repeat", "2", "--json", str(tmp_path / "r.json")]
    code, output = run_script(*launch, *sizes, limit_s=120, TMPDIR=str(tmp_path))  # torchrun leaves a folder
    assert code == 0, output
    assert output.count("Transfers") == 1
    assert len(Record.read(tmp_path / "r.json").rows) == 2


def test_torchrun_sets_workers_and_links(monkeypatch):
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    for size, options, message in (("3", [], "torchrun has started 3 workers"), ("2", ["--link", "1mbit"], "--link")):
        monkeypatch.setenv("WORLD_SIZE", size)
        result = CliRunner().invoke(app, ["bench", "link", *options])
        assert result.exit_code == 2
        assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "large"], "--sizes are bytes of tensors"),
        (["--link", "fast"], "--link is a rate from 1kbit to 600gbit"),
        (["--compress", "bogus"], "there is no codec 'bogus'"),
        (["--plot", "r.pdf"], "--plot writes PNG"),
        (["--verify"], "--verify checks links that are shaped: name some with --link"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = CliRunner().invoke(app, ["bench", "link", *arguments])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line
