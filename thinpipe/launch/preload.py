"""The first import of the server that forks workers: sets signal handlers, then imports torch and the pipeline."""

import atexit
import importlib
import os
import signal
from types import FrameType

from thinpipe.comm.signals import ENDING, end_with_parent, unblock_signals
from thinpipe.launch.forking import LAUNCHER, remove_folders_of

_launcher, _server, _has_forked = int(os.environ.pop(LAUNCHER, os.getppid())), os.getpid(), False


def _end(number: int, frame: FrameType | None) -> None:
    """Exit silently on a signal: the launcher reports it. Workers inherit this until they set their own handlers."""
    # Signals to the process group reach the server too; it must outlive its workers, to report how they ended.
    if not _has_forked or os.getpid() != _server:
        _leave(128 + number)


def _leave(code: int) -> None:
    """Exit immediately: there is nothing to clean up, and an ordinary exit with torch in memory takes a second."""
    if os.getpid() == _server and os.getppid() != _launcher:  # the launcher was killed; workers handle that themselves
        remove_folders_of(_launcher)
    os._exit(code)


def _note_fork() -> None:
    global _has_forked
    _has_forked = True


os.register_at_fork(before=_note_fork)
for _number in ENDING:
    if signal.getsignal(_number) is not signal.SIG_IGN:  # ignored under nohup
        signal.signal(_number, _end)
unblock_signals()
end_with_parent()  # before the imports: this process holds the launcher's stdout open
if os.getppid() != _launcher:  # the launcher was already killed
    _leave(1)

# By name: this package does not depend on pipelines, but nearly all workers run one.
importlib.import_module("thinpipe.pipeline.stage")

atexit.register(_leave, 0)
