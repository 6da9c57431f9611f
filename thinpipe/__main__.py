"""The entry point of ``thinpipe`` and ``python -m thinpipe``; few imports, so that signal handlers are set early."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from thinpipe.comm.errors import debugging, ended_by, leave, print_os_error
from thinpipe.extras import missing_extra


def main() -> None:
    """Run the command line, and exit with the code that shells expect."""
    _open_closed_streams()
    end, numbers = _End(), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, end)
    # Torch reads it on import. Otherwise it warns on every machine whose address has no reverse DNS name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code = 0
    try:
        from thinpipe.cli.app import app

        app()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except ModuleNotFoundError as error:
        line = missing_extra(error)
        if line is None or debugging():
            raise
        print(f"thinpipe: {line}", file=sys.stderr)
        code = 2
    except OSError as error:
        if debugging():
            raise
        code = print_os_error(error)
    # All output is complete. An ordinary exit would take a second with torch in memory, die silently of a signal that
    # arrives meanwhile, and abort if a thread of gloo still needs Python.
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    _leave(code)


def _open_closed_streams() -> None:
    """Open /dev/null in place of standard streams that the shell closed, as ``>&-`` does.

    Otherwise the next file or socket gets the descriptor of stdout, and printed text is written to it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(opened, True)  # workers print, too
            setattr(sys, name, os.fdopen(opened, "w" if number else "r"))


class _End:
    """The signal handler until a command sets its own: print one line, and exit with the code that shells expect."""

    def __init__(self) -> None:
        self._is_reported = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._is_reported:
            self._is_reported = True
            os.write(2, f"thinpipe: {ended_by(number)}\n".encode())  # print itself may have been interrupted
        if _is_importing(frame):
            # An exception can be lost there: libraries catch failed imports. No work of ours is in progress.
            _leave(128 + number)
        raise SystemExit(128 + number)


def _leave(code: int) -> NoReturn:
    atexit._run_exitfuncs()
    leave(code)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


if __name__ == "__main__":
    main()
