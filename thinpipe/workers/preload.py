"""Imported first by the server that forks workers: what signals do to it, then torch and the pipeline, once for all."""

import atexit
import importlib
import os
import signal
from types import FrameType

from thinpipe.workers.signals import ENDING, end_with_parent, unblock_signals

_server, _has_forked = os.getpid(), False


def _end(number: int, frame: FrameType | None) -> None:
    """End without a word: the launcher has one. Workers inherit this, until they take signals themselves."""
    # What ends the process group reaches the server too; it must outlive its workers, to say how they ended.
    if not _has_forked or os.getpid() != _server:
        os._exit(128 + number)


def _note_fork() -> None:
    global _has_forked
    _has_forked = True


os.register_at_fork(before=_note_fork)
for _number in ENDING:
    if signal.getsignal(_number) is not signal.SIG_IGN:  # as nohup asks for
        signal.signal(_number, _end)
unblock_signals()
end_with_parent()  # not only when all is imported: it holds the launcher's stdout open

# By its name: workers as such know nothing of pipelines, but nearly all of them run one.
importlib.import_module("thinpipe.pipeline.stage")

# It has nothing to clean up, and an ordinary exit with torch in memory takes a second.
atexit.register(os._exit, 0)
