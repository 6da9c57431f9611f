"""Imported first by the server that forks workers: what signals do to it, then torch and the pipeline, once for all."""

import atexit
import importlib
import os
import signal
from types import FrameType

from thinpipe.comm.signals import ENDING, end_with_parent, unblock_signals
from thinpipe.launch.forking import LAUNCHER, remove_folders_of

_launcher, _server, _has_forked = int(os.environ.pop(LAUNCHER, os.getppid())), os.getpid(), False


def _end(number: int, frame: FrameType | None) -> None:
    """End without a word: the launcher has one. Workers inherit this, until they take signals themselves."""
    # What ends the process group reaches the server too; it must outlive its workers, to say how they ended.
    if not _has_forked or os.getpid() != _server:
        _leave(128 + number)


def _leave(code: int) -> None:
    """At once: there is nothing to clean up, and an ordinary exit with torch in memory takes a second."""
    if os.getpid() == _server and os.getppid() != _launcher:  # which was killed; workers see to it themselves
        remove_folders_of(_launcher)
    os._exit(code)


def _note_fork() -> None:
    global _has_forked
    _has_forked = True


os.register_at_fork(before=_note_fork)
for _number in ENDING:
    if signal.getsignal(_number) is not signal.SIG_IGN:  # as nohup asks for
        signal.signal(_number, _end)
unblock_signals()
end_with_parent()  # not only when all is imported: it holds the launcher's stdout open
if os.getppid() != _launcher:  # it was killed before
    _leave(1)

# By its name: workers as such know nothing of pipelines, but nearly all of them run one.
importlib.import_module("thinpipe.pipeline.stage")

atexit.register(_leave, 0)
