"""Every test starts from the same random state; those that need several processes share them."""

import gc
import signal
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from tests import preloaded
from tests.pool import PRELOADED, Pool


def _preload(modules: list[str], known: Callable[[list[str]], None] = forkserver.set_forkserver_preload) -> None:
    """Whoever starts the server of workers first: pools and commands in this process share it to the end."""
    known([*PRELOADED, *modules])


def pytest_configure(config: pytest.Config) -> None:
    # Programs that tests start and signal inherit signals that are ignored, and no handlers. nohup ignores SIGHUP:
    # pytest goes on ignoring it. Bash ignores SIGINT in background jobs of scripts: there pytest takes it again.
    for number, handler in ((signal.SIGHUP, lambda *_: None), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    forkserver.set_forkserver_preload = _preload
    if getattr(config.option, "numprocesses", None):  # one server for all of them, which imports when it is needed
        preloaded.start()


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays to the end: it need not be looked through for what can go


def pytest_unconfigure() -> None:
    preloaded.stop()


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    """Start the pool of workers when it is first needed; forked in a test, so that pytest captures its output."""
    preloaded.keep_a_server()


@pytest.fixture(autouse=True)
def _reseed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _pools() -> Iterator[list[Pool]]:
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(_pools: list[Pool]) -> Pool:
    """Four workers, started for the first test that needs them and again after one that ended them."""
    if not _pools or not _pools[-1].alive:
        _pools.append(Pool(4))
    return _pools[-1]


@pytest.fixture
def fake_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the log of the fake runs of tests/lab/ablation/fake_train.py."""
    path = tmp_path / "fake_train.log"
    monkeypatch.setenv("FAKE_TRAIN_LOG", str(path))
    return path
