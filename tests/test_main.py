"""Standard streams that the shell has closed: nothing else may get their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import run_script
from thinpipe.lab.records.record import Record

CLOSED = """
import os, sys
for number in map(int, sys.argv.pop(1).split(",")):
    os.close(number)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
STREAMS = """
import os, socket, sys
from thinpipe.__main__ import _open_closed_streams
_open_closed_streams()
with socket.socket() as first:
    assert first.fileno() > 2, first.fileno()
assert [each.fileno() for each in (sys.stdin, sys.stdout, sys.stderr)] == [0, 1, 2]
assert all(os.get_inheritable(number) for number in range(3))
print("printed", flush=True)
print("told", file=sys.stderr)
"""


@pytest.mark.parametrize(("closed", "output"), [("0", "printed\ntold\n"), ("1", "told\n"), ("0,1", "told\n")])
def test_closed_streams_are_opened(closed: str, output: str) -> None:
    assert run_script("-c", CLOSED, closed, "-c", STREAMS, fresh=True) == (0, output)


def test_a_run_whose_stdout_is_closed_continues(tmp_path: Path) -> None:
    small = ["--samples=64", "--batch-size=32", "--chunks=2", "--image-size=16", "--threads=1", "--epochs=1", "--json"]
    path = str(tmp_path / "r.json")
    code, output = run_script("-c", CLOSED, "1", "-m", "thinpipe", "train", *small, path, fresh=True)
    assert (code, output) == (0, f"wrote {path}\n")
    assert Record.read(Path(path)).rows
