"""docs/many-machines.md, rehearsed: two agents of torchrun on loopback, a worker each, train as one machine does."""

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import Program
from tests.train.tasks.written import write_language_model
from tests.train.toy import Recorder, run_toy
from thinpipe import __main__
from thinpipe.cli import app as cli
from thinpipe.comm import addresses
from thinpipe.lab.records.record import Record
from thinpipe.train.tasks.tasks import task

LIMIT_S = 120  # two steps of a tiny model; nearly all of it is starting Python and compiling codecs on busy cores
TINY = [
    *("--samples", "64", "--batch-size", "32", "--chunks", "2", "--epochs", "1"),
    *("--image-size", "16", "--threads", "1"),
]
PROGRAM = ["-m", "thinpipe", "train", *TINY]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_together(commands: list[list[str]], temporary: Path) -> list[tuple[str, str]]:
    """Output and errors of commands that need each other; all are ended if one fails or is late."""
    environment = os.environ | {"COLUMNS": "80", "TMPDIR": str(temporary)}  # torchrun leaves a folder
    processes = [Program(*each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) for each in commands]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # an agent ends its workers
        for process in processes:
            process.wait(timeout=30)
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return outputs


def processes_of(path: Path) -> list[str]:
    """The processes that were started with this path among their options."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(path).encode() in each.read_bytes():
                found.append(each.parent.name)
        except OSError:
            continue
    return found


def train_here(group) -> Recorder:
    """The same run on two workers of one machine; what its client heard."""
    options = {"samples": 64, "batch_size": 32, "chunks": 2, "epochs": 1, "image_size": 16, "threads": 1}
    return run_toy(group, task("digits"), **options)


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_two_agents_train_as_one_machine_does(pool, tmp_path):
    path, port = tmp_path / "r.json", free_port()
    agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
    outputs = run_together([[*agent, str(rank), *PROGRAM, "--json", str(path)] for rank in (0, 1)], tmp_path)
    row = Record.read(path).rows[0]
    here = pool.run(train_here, 2)[0]
    assert row["parameters_sha256"] == here.end.parameters_sha256
    assert row["wire_bytes_per_step"] == here.steps[0].wire_bytes > 0
    assert row["steps"] == 2
    assert ["Result" in out for out, _ in outputs] == [True, False]  # --node-rank 0 is the client, which alone speaks
    assert processes_of(path) == []


TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60
OPTIONS = ["--tokens", "32", "--batch-size", "8", "--chunks", "2", "--epochs", "1", "--samples", "16", "--threads", "1"]
PROGRESS = re.compile(r"thinpipe: (joined worker 0|worker \d+ holds|the run is complete).*\n")  # of a server


def run_in(folders: list[Path], options: list[list[str]]) -> list[tuple[int, str]]:
    """Start a worker in each folder; return exit codes and errors. All are ended if one is late."""
    port = free_port()
    where = ["--workers", str(len(folders)), "--master", f"127.0.0.1:{port}", "--rank"]
    processes = [
        Program(
            *["-m", "thinpipe", "train", *own, *OPTIONS, *where, str(rank)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder,
        )
        for rank, (folder, own) in enumerate(zip(folders, options, strict=True))
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=30)
    return [(process.returncode, PROGRESS.sub("", error)) for process, error in zip(processes, errors, strict=True)]


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """Two home folders: a model in both, under different names, and texts in the first."""
    write_language_model(tmp_path / "one" / "llama", TEXT)
    shutil.copytree(tmp_path / "one" / "llama", tmp_path / "two" / "models" / "llama")
    (tmp_path / "one" / "a.txt").write_text(TEXT)
    return [tmp_path / "one", tmp_path / "two"]


@pytest.mark.timeout(3 * LIMIT_S + 60)
def test_machines_have_files_in_different_places_and_resume_after_they_moved(machines: list[Path]) -> None:
    client, server = ["--model", "llama", "--data", "a.txt"], ["--model", "models/llama", "--threads", "2"]
    saved = ["--save", "run", "--save-local"]
    assert run_in(machines, [client + saved + ["--steps", "1"], server + saved + ["--steps", "1"]]) == [(0, "")] * 2
    (machines[0] / "a.txt").rename(machines[0] / "b.txt")
    (machines[1] / "models").rename(machines[1] / "moved")
    again = ["--resume", "run", "--save-local"]
    ended = run_in(machines, [[*again, "--data", "b.txt"], [*again, "--model", "moved/llama"]])
    assert ended == [(0, "")] * 2
    assert [path.name for path in sorted((machines[0] / "run").glob("step-*"))] == ["step-00000001", "step-00000002"]
    assert not (machines[1] / "run").exists()


@pytest.mark.timeout(LIMIT_S + 60)
def test_a_folder_that_one_machine_lacks_is_named_with_its_worker(machines: list[Path]) -> None:
    ended = run_in(machines, [["--model", "llama", "--data", "a.txt"], ["--model", "llama"]])
    line = "thinpipe: worker 1 has no folder llama: bring the client's, and name it there with --model\n"
    assert ended == [(2, line)] * 2


@pytest.mark.timeout(LIMIT_S + 60)
def test_replicas_read_the_same_data_wherever_it_is(machines: list[Path]) -> None:
    (machines[1] / "b.txt").write_text(TEXT.replace("first", "front"))
    data = [["--parallel", "data", "--model", "llama", "--data", "a.txt"]]
    data += [["--parallel", "data", "--model", "models/llama", "--data", "b.txt"]]
    (code, error), other = run_in(machines, [[*each, "--batch-size", "8"] for each in data])
    assert (code, error) == other
    assert code == 2
    assert "all who read data read the same, but worker 1 does not have the client's" in error


@pytest.mark.timeout(2 * LIMIT_S + 60)
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_server_started_by_hand_reports_run_units_and_end(host, tmp_path):
    if host == "[::1]" and "::1" not in addresses._ipv6_of("lo"):
        pytest.skip("no IPv6 here")
    master = f"{host}:{free_port()}"
    commands = [[*PROGRAM, "--workers", "2", "--rank", str(rank), "--master", master] for rank in (0, 1)]
    (client_out, client_err), (server_out, server_err) = run_together(commands, tmp_path)
    assert "Result" in client_out
    assert client_err == server_out == ""
    joined, holds, end = server_err.splitlines()
    assert joined == f"thinpipe: joined worker 0 at {master} as worker 1 of 2"
    assert re.fullmatch(r"thinpipe: worker 1 holds units \d+ to \d+ \(.* to .*\), [\d,]+ parameters", holds)
    assert end == "thinpipe: the run is complete"


@pytest.mark.parametrize("verb", ["train", "evaluate"])
@pytest.mark.parametrize("problem", ["another machine's address", "port in use"])
def test_an_address_at_which_worker_0_cannot_listen_is_one_line(verb, problem, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        master = f"127.0.0.1:{port}" if problem == "port in use" else f"192.0.2.1:{port}"
        options = [*TINY[2:6], *TINY[8:]] if verb == "evaluate" else TINY
        command = ["-m", "thinpipe", verb, *options, "--workers", "2", "--rank", "0", "--master", master]
        process = Program(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    (line,) = err.splitlines()
    assert line.startswith(f"thinpipe: worker 0: cannot listen at {master}, where the others look for worker 0: ")
    assert line.endswith("Name an address of this machine and a free port")


def test_torchs_warnings_about_reverse_dns_are_off_by_default(monkeypatch):
    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(cli, "app", lambda: None)
    monkeypatch.setattr(__main__, "_leave", end)
    for given, expected in ((None, "ERROR"), ("INFO", "INFO")):
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
        if given:
            monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given)
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            with pytest.raises(SystemExit):
                __main__.main()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        assert os.environ.pop("TORCH_CPP_LOG_LEVEL") == expected
