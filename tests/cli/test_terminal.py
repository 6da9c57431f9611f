"""How verbs end: told which signal it was; a disk that is full after all loses no record."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import typer

from thinpipe.cli.terminal import Outputs, one_line_errors, takes
from thinpipe.comm.errors import Interrupted, Terminated
from thinpipe.lab.records.plot import Plot
from thinpipe.lab.records.record import Column, Record

RECORD = Record(
    kind="k", config={}, columns=(Column(name="ms", heading="ms"),), rows=({"ms": 1.5},), environment={"torch": "2"}
)


def test_an_unwritable_record_goes_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone, page = tmp_path / "gone" / "r.json", tmp_path / "r.md"
    with pytest.raises(typer.Exit) as ended:
        Outputs(json=gone, markdown=page).save(RECORD, [], "title")
    assert ended.value.exit_code == 1
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"wrote {page}",
        f"thinpipe: {gone} cannot be written: No such file or directory; the record is on stdout instead",
    ]
    copied = tmp_path / "copied.json"
    copied.write_text(out)
    assert Record.read(copied) == RECORD


def test_a_page_and_a_plot_that_cannot_be_written_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(self: Plot, path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Plot, "draw", draw)
    outputs = Outputs(json=None, markdown=tmp_path / "gone" / "r.md", plot=tmp_path / "r.png")
    with pytest.raises(typer.Exit):
        outputs.save(RECORD, [], "title", Plot.__new__(Plot))
    (line,) = capsys.readouterr().err.splitlines()
    assert "r.md cannot be written: No such file or directory; " in line
    assert line.endswith("r.png cannot be written: No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("raised", "words", "code"),
    [
        (KeyboardInterrupt(), "interrupted", 130),
        (Terminated(129), "ended by SIGHUP", 129),  # the launcher of workers
        (Interrupted(signal.SIGTERM), "ended by SIGTERM", 143),  # a worker that was started elsewhere
    ],
)
def test_the_signal_that_ended_workers_is_reported(
    raised: BaseException, words: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    @takes(panels=())
    def verb() -> None:
        raise raised

    with pytest.raises(SystemExit) as ended:
        verb()
    assert ended.value.code == code
    assert capsys.readouterr().err == f"thinpipe: {words}\n"


def test_an_error_about_a_file_from_elsewhere_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), one_line_errors():
        raise ValueError("data.csv: no column '\x1b]52;c;aGk=\x07'")
    assert capsys.readouterr().err == "thinpipe: data.csv: no column '?]52;c;aGk=?'\n"
