"""Programs without the seconds that their imports take: forked by a process that has imported all of it already.

    tests                     python -m tests.preloaded           a program
    Program("script.py")  ->  imports at the first request,  ->   own session, environment, folder, files;
    waits for it          <-  forks, says how it ended            the server of its workers is forked likewise

What a program starts with this Python (torchrun its workers, an ablation its trainings) is forked likewise. What
differs from a fresh interpreter: modules are there before they are imported, /proc names another command, the parent is
another process, and nothing runs in between (``preexec_fn``). So tests of imports, of signals meanwhile, of commands
that are looked for and of what ends with its parent start Python itself.

The server of workers that tests start in their own process is forked from that, with what it has imported.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.pool import PRELOADED

ROOT = Path(__file__).parents[1]
PLACE = "THINPIPE_TESTS_PRELOADED"  # the server's socket, for all processes of pytest-xdist
NAMESPACE = "THINPIPE_TESTS_NAMESPACE"  # the network namespace that a program runs in, with its workers
_CLONE_NEWNET = 0x40000000
# But for what does something when it is imported, which programs and their servers do themselves.
_IMPORTED = [
    *(name for name in PRELOADED if name != "thinpipe.launch.preload"),
    "thinpipe.pipeline.stage",
    "thinpipe.cli.app",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
]
_own: list[Any] = []  # the server that this process has started
_starting = threading.Lock()


def start() -> None:
    """Start the server, unless it runs; it ends with this process."""
    with _starting:
        if PLACE in os.environ:
            return
        place = f"{tempfile.mkdtemp(prefix='preloaded-')}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(place)
            listener.listen()
            command = [sys.executable, "-m", "tests.preloaded", str(listener.fileno())]
            # Its stdin is never written to: that it ends says that this process has.
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], cwd=ROOT, start_new_session=True
            )
        _own.append(server)
        os.environ[PLACE] = place
        atexit.register(stop)


def stop() -> None:
    """End the server, if this process has started it."""
    if _own:
        (server,) = _own
        server.stdin.close()
        server.wait()  # it removes its folder
        del os.environ[PLACE]
        _own.clear()


class Forked(subprocess.Popen[Any]):
    """``Popen`` of a command that starts with this Python."""

    def _execute_child(self, *given: Any) -> None:
        """Called by ``Popen`` with all that was asked for and both ends of its pipes, or -1 where there is none."""
        (_, *arguments), _, _, _, _, folder, env, _, _, _, *pipes = given[:16]
        stdin, _, _, stdout, _, stderr = pipes
        place = os.environ[PLACE]
        request = {
            "arguments": arguments,
            "folder": str(folder or os.getcwd()),
            "env": {**(env or os.environ), PLACE: place},
        }
        files = [number if number >= 0 else usual for usual, number in enumerate((stdin, stdout, stderr))]
        self._server = socket.socket(socket.AF_UNIX)
        _send(self._server, request, files, place)
        self.pid, self._child_created = _number(self._server), True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        self._server.setblocking(not flags & os.WNOHANG)
        try:
            status = _number(self._server)
        except BlockingIOError:
            return 0, 0
        self._server.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        """``_deadstate``: what is said of a program that a test has forgotten, if its end cannot be known any more."""
        with self._waitpid_lock:
            if self.returncode is None:
                try:
                    pid, status = self._try_wait(os.WNOHANG)
                except OSError:
                    if _deadstate is None:
                        raise
                    self.returncode = _deadstate
                    return self.returncode
                if pid:
                    self._handle_exitstatus(status)
        return self.returncode


class Program(Forked):
    """``Popen`` for what would follow ``python`` on a command line: a script, ``-m MODULE`` or ``-c CODE``."""

    def __init__(self, *arguments: str, **given: Any) -> None:
        start()
        super().__init__([sys.executable, *arguments], text=True, start_new_session=True, **given)


def _send(connection: socket.socket, request: dict[str, Any], files: Sequence[int], place: str | None = None) -> None:
    words = json.dumps(request).encode()
    if place is not None:  # now: a server waits for the words of whoever is connected
        connection.connect(place)
    socket.send_fds(connection, [len(words).to_bytes(4, "big")], files)
    connection.sendall(words)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    length, files, *_ = socket.recv_fds(connection, 4, 16)
    if not length:
        return None
    return json.loads(connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)), files


def _number(connection: socket.socket) -> int:
    said = connection.recv(8)
    if not said:
        raise RuntimeError("the process that forks programs for tests has ended; what it said is above")
    return int.from_bytes(said, "big")


def _serve(listener: socket.socket) -> None:
    """Fork a program for every connection, until stdin ends."""
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    running: dict[int, socket.socket] = {}
    ready = selectors.DefaultSelector()
    for each in (listener, woken, sys.stdin):
        ready.register(each, selectors.EVENT_READ)
    while True:
        heard = [key.fileobj for key, _ in ready.select()]
        if sys.stdin in heard:
            return
        if woken in heard:
            woken.recv(4096)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                _tell(running.pop(ended[0]), ended[1])
        if listener in heard:
            connection, _ = listener.accept()
            import_all()
            received = _receive(connection)
            if received is None:
                continue
            request, files = received
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for open_here in (ready, listener, woken, wake, connection, *running.values()):
                    open_here.close()
                _become(request, files)
            for number in files:
                os.close(number)
            running[pid] = connection
            _tell(connection, pid)


def _tell(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(number.to_bytes(8, "big"))
    except OSError:  # whoever asked for it has gone
        connection.close()


def import_all() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # programs need not look through it again and again


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Run a program in this process as Python does at startup; return at its end, unless it raises."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in set(files) - {0, 1, 2}:
        os.close(file)
    os.chdir(request["folder"])
    if namespace := request["env"].pop(NAMESPACE, None):
        _enter(namespace)
    _set_environment(request["env"])
    keep_a_server()
    subprocess.Popen.__new__ = _fork_or_start
    arguments = request["arguments"]
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        arguments = arguments[1:]
    first, *rest = arguments
    path = [entry for entry in sys.path[1:] if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if first in ("-m", "-c"):
        sys.argv = [first, *rest[1:]]
        sys.path = [os.getcwd() if first == "-m" else "", *path]
    else:
        sys.argv = [first, *rest]
        sys.path = [str(Path(first).resolve().parent), *path]
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        _run_text(rest[0])
    else:
        runpy.run_path(first, run_name="__main__")
    sys.exit(0)


def _fork_or_start(kind: type[Any], args: Any = None, *_: Any, **__: Any) -> Any:
    """``Popen.__new__`` in a program, so that it also counts for who has imported the class by its name."""
    executable, option = [*([args] if isinstance(args, str) else args), ""][:2]
    is_python = executable == sys.executable and (option in ("-u", "-m", "-c") or option.endswith(".py"))
    return object.__new__(Forked if kind is subprocess.Popen and is_python else kind)


def _enter(namespace: str) -> None:
    """Move this process into a network namespace of `ip netns`; Python has ``os.setns`` since 3.12."""
    with open(f"/run/netns/{namespace}") as opened:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(opened.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")


def _set_environment(env: dict[str, str]) -> None:
    import torch

    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ |= env
    tempfile.tempdir = None
    if (asked := env.get("OMP_NUM_THREADS")) != threads:  # which is read when torch is imported
        torch.set_num_threads(int(asked) if asked else len(os.sched_getaffinity(0)))


def _run_text(code: str) -> None:
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "<string>", "exec"), vars(module))


def keep_a_server() -> None:
    """Fork now, before there is a handler or a thread, what becomes the server of workers if one is asked for."""
    mine, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        mine.close()
        _become_server(theirs)
    theirs.close()
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_or_take(path: Any, arguments: Sequence[Any], files: Sequence[int]) -> int:
        command = os.fsdecode(arguments[-1])
        if mine.fileno() < 0 or "multiprocessing.forkserver" not in command:
            return spawn(path, arguments, files)
        _send(mine, {"code": command, "files": list(files), "env": dict(os.environ)}, files)
        mine.close()
        return pid

    multiprocessing.util.spawnv_passfds = spawn_or_take


def _become_server(end: socket.socket) -> None:
    """Wait until it is asked for; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a word, as long as there is no server
    received = _receive(end)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if received is None:  # the program has ended and asked for none
        os._exit(0)
    request, files = received
    end.close()
    _set_environment(request["env"])
    # Above all numbers in use, then where the command looks for them: neither may close the other.
    above = max(*files, *request["files"]) + 1
    for place, file in enumerate(files):
        os.dup2(file, above + place)
        os.close(file)
    for place, number in enumerate(request["files"]):
        os.dup2(above + place, number)
        os.close(above + place)
    sys.argv = ["-c"]
    code = 1
    try:
        _run_text(request["code"])
    except SystemExit:
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    os._exit(code)  # not back into what this process was forked from: pytest, in the middle of its work


if __name__ == "__main__":
    _listener = socket.socket(fileno=int(sys.argv[1]))
    _serve(_listener)
    shutil.rmtree(Path(_listener.getsockname()).parent, ignore_errors=True)  # whoever made it may have been killed
