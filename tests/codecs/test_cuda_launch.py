"""Compilation and launch of GPU kernels, without a GPU as on one."""

from __future__ import annotations

import contextlib
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from tests.codecs.gpu import ON_GPU

launching = sys.modules["thinpipe.codecs.kernels.cuda.launch"]
pytestmark = pytest.mark.skipif(ON_GPU, reason="without a GPU as on one")


class FakeKernel:
    """Notes what is compiled and run."""

    def __init__(self, name: str, log: list[str], seconds: float = 0) -> None:
        self.__name__, self.log, self.seconds = name, log, seconds

    def warmup(self, *arguments: object, grid: tuple[int], **options: object) -> FakeKernel:
        self.log.append(f"compile {self.__name__}")
        time.sleep(self.seconds)
        return self

    function, packed_metadata = "the code on the GPU", "its threads"

    def run(self, x: int, y: int, z: int, stream: int, *arguments: object) -> None:
        *given, address, number = arguments
        assert given == [self.function, self.packed_metadata, None, None, None]
        assert isinstance(address, int)
        self.log.append(f"run {self.__name__} {x} with {number} on {stream}")


@pytest.fixture
def without_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Launches as on a GPU, with what is compiled forgotten, and locks in a folder of the test's own."""
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=5))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_kernels_of_a_call_are_compiled_before_any_runs(without_interpreter: None) -> None:
    log: list[str] = []
    first, second = FakeKernel("first", log), FakeKernel("second", log)
    launches = [launching.Launch(kernel, 3, (torch.zeros(4), 7)) for kernel in (first, second, first)]
    launching.launch(*launches)
    assert sorted(log[:2]) == ["compile first", "compile second"]
    assert log[2:] == ["run first 3 with 7 on 5", "run second 3 with 7 on 5", "run first 3 with 7 on 5"]
    launching.launch(launches[1])
    assert log[5:] == ["run second 3 with 7 on 5"]
    launching.launch(launches[1]._replace(options={"maxnreg": 255}))  # another program on the GPU
    assert log[6:] == ["compile second", "run second 3 with 7 on 5"]


def test_a_long_compilation_is_announced(
    without_interpreter: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launching, "SILENT_S", 0.01)
    launching.launch(launching.Launch(FakeKernel("slow_kernel", [], seconds=0.3), 1, (torch.zeros(4), 7)))
    assert capsys.readouterr().err == "thinpipe: compiling for the GPU, once on this machine: slow_kernel\n"
