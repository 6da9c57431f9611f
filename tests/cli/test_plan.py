"""thinpipe plan on the command line."""

import pytest
from typer.testing import CliRunner

from thinpipe.cli.app import app
from thinpipe.comm.errors import WorkerError
from thinpipe.lab.plan import planning


def test_a_worker_that_fails_while_parts_are_measured_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise WorkerError("worker 1: out of memory", 1)

    monkeypatch.setattr(planning, "make_plan", fail)
    result = CliRunner().invoke(app, ["plan", "--task", "digits"])
    assert result.exit_code == 1
    assert result.stderr == "thinpipe: worker 1: out of memory\n"
