"""Transfers that are interrupted, rejected or changed: one line on all workers, and what has arrived is kept."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.train.serve.runs import FILES, Offer, layer_bytes, train_with
from tests.train.tasks.written import write_language_model
from tests.train.toy import world_in
from thinpipe.comm.group import FILE_TAG
from thinpipe.train.engines.world import SetupError
from thinpipe.train.models.remote import all_loaded, fetched, note_parts
from thinpipe.train.serve import model_cache, transfer
from thinpipe.train.serve.model_cache import CachedFolder
from thinpipe.train.serve.model_files import describe_files, serve_files
from thinpipe.train.tasks.options import Source

TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60
SMALL_BLOCK = 1000  # bytes: matrices have several


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_language_model(folder / "model", TEXT)
    (folder / "text.txt").write_text(TEXT)
    return folder


def train_faulty(group: Any, home: Path, offer: Offer, fault: str = "", after: int = 0) -> Any:
    """Train with small blocks; a server fails at one of its blocks. What is seen, or the error."""
    write, hash_of, is_server = model_cache.write_all, transfer.hash_of, group.rank() > 0
    count = 0

    def write_some(handle: int, data: memoryview, offset: int) -> None:
        nonlocal count
        count += len(data) <= SMALL_BLOCK and offset > 0
        if count > after and fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if count > after and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        write(handle, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        for module in (model_cache, transfer):
            patch.setattr(module, "BLOCK", SMALL_BLOCK)
        patch.setattr(transfer, "_MOST_SENT", 4 * SMALL_BLOCK)
        patch.setattr(transfer, "_SAVE_S", 0.0)
        patch.setattr(transfer, "_PROGRESS_S", 0.0)
        if is_server and fault:
            patch.setattr(model_cache, "write_all", write_some)
        if not is_server and fault == "changed":
            patch.setattr(transfer, "hash_of", lambda content: hash_of(content)[::-1])
        try:
            return train_with(group, offer, {"model": str(home / "model"), "data": str(home / "text.txt")})
        except SetupError as error:
            return str(error)


def test_tensors_of_many_blocks(pool: Pool, home: Path, tmp_path: Path) -> None:
    with_files = pool.run(train_faulty, 2, home, FILES)[0]
    client, server = pool.run(train_faulty, 2, home, Offer(caches=tmp_path))
    assert client.result == with_files.result
    assert client.sent == [server.received["model"]] == [layer_bytes(home / "model", (0, 1, 2))]
    assert len([line for line in server.lines if "/s" in line]) > 20


def test_after_a_full_disk_the_rest_is_fetched(pool: Pool, home: Path, tmp_path: Path) -> None:
    there, whole = Offer(caches=tmp_path), layer_bytes(home / "model", (0, 1, 2))
    errors = pool.run(train_faulty, 2, home, there, "full", 40)
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"model files are kept in {tmp_path / '1'}: No space left on device; free some space")
    client, server = pool.run(train_faulty, 2, home, there)
    assert client.result == pool.run(train_faulty, 2, home, FILES)[0].result
    assert server.received["model"] < whole - 30 * SMALL_BLOCK


def test_a_killed_server_goes_on_where_it_was(home: Path, tmp_path: Path) -> None:
    there, whole = Offer(caches=tmp_path), layer_bytes(home / "model", (0, 1, 2))
    killed, again = Pool(2), Pool(2)
    try:
        with pytest.raises((RuntimeError, EOFError)):
            killed.run(train_faulty, 2, home, there, "killed", 40)
        client, server = again.run(train_faulty, 2, home, there)
        assert client.result == again.run(train_faulty, 2, home, FILES)[0].result
        assert server.received["model"] < whole - 30 * SMALL_BLOCK
    finally:
        killed.close()
        again.close()


def test_bytes_that_change_on_their_way(pool: Pool, home: Path, tmp_path: Path) -> None:
    errors = pool.run(train_faulty, 2, home, Offer(caches=tmp_path), "changed")
    assert len(set(errors)) == 1
    assert "was changed on its way from the client" in errors[0]


def ask(group: Any, home: Path, requests: list[Any]) -> Any:
    """Worker 1 sends requests of its own; the answers to it, or the error that ends the client's run."""
    world = world_in(group)
    files = describe_files(Source(model=str(home / "model")))
    if world.is_client:
        try:
            with serve_files(files, world.control, print):
                note_parts({0: [OTHER], 1: [NAME]})
                fetched(home / "model", [OTHER], lambda names: set(names).__contains__)
                world.together(all_loaded)
        except SetupError as error:
            return str(error)
        return "served"
    answers = []
    for request in requests:
        world.control.send_json(request, 0, tag=FILE_TAG)
        answers.append(world.control.receive_json(0, tag=FILE_TAG))
    world.control.send_json({"done": True}, 0, tag=FILE_TAG)
    with pytest.raises(SetupError):
        world.together(all_loaded)
    return answers


NAME, OTHER = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"


def asking(blocks: Any, folder: Any = "model", total: Any = 1) -> Any:
    return {"folder": folder, "total": total, "blocks": blocks}


@pytest.mark.parametrize(
    "request_of_a_server",
    [
        asking([["model.layers.9.mlp.up_proj.weight", 0, True]]),
        asking([["../model/tokenizer.json", 0, True]]),
        asking([[NAME, 0, True]], folder="weights"),
        asking([[NAME, 0, True]], folder="../../etc"),
        asking([[NAME, 0, True]], folder=["model"]),
        asking([[NAME, 1, True]]),
        asking([[NAME, -1, True]]),
        asking([[NAME, 1e300, True]]),
        asking([[NAME, True, True]]),
        asking([[[NAME], 0, True]]),
        asking([[NAME, 0]]),
        asking(5),
        asking("text"),
        {"folder": "model"},
        {"done": False},
        [1, 2],
        "done",
        None,
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_not_in_the_manifest_is_rejected(pool: Pool, home: Path, request_of_a_server: Any) -> None:
    error, answers = pool.run(ask, 2, home, [request_of_a_server, asking([[NAME, 0, False]])])
    assert error.startswith("worker 1 asked for tensors that are not among the run's files: ")
    assert answers == [{"problem": error}] * 2  # to the end of the run


def test_a_server_gets_no_tensors_of_other_layers(pool: Pool, home: Path) -> None:
    error, answers = pool.run(ask, 2, home, [asking([[NAME, 0, False]]), asking([[OTHER, 0, False]])])
    assert error == f"worker 1 asked for a tensor of other layers than its own: {OTHER}"
    assert "hashes" in answers[0]
    assert answers[1] == {"problem": error}


def test_a_server_cannot_ask_for_ever(pool: Pool, home: Path) -> None:
    error, answers = pool.run(ask, 2, home, [asking([[NAME, 0, False]] * 200)] * 40)
    assert error == "worker 1 asked for more tensors than it can need"
    assert "hashes" in answers[0]
    assert answers[-1] == {"problem": error}


def test_a_client_that_answers_something_else(pool: Pool, home: Path, tmp_path: Path) -> None:
    errors = pool.run(train_with_a_rogue, 2, home, Offer(caches=tmp_path))
    assert errors == ["the client did not answer a request for tensors: use the same version of thinpipe"] * 2


def train_with_a_rogue(group: Any, home: Path, offer: Offer) -> Any:
    def answer(self: Any, request: Any, *_: Any) -> None:
        self._send({"hashes": []})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer.FileService, "_answer", answer)
        try:
            return train_with(group, offer, {"model": str(home / "model"), "data": str(home / "text.txt")})
        except SetupError as error:
            return str(error)


def test_blocks_are_kept_only_with_their_list(home: Path, tmp_path: Path) -> None:
    files = describe_files(Source(model=str(home / "model"))).folders["model"][1]
    cache = model_cache.ModelCache(tmp_path, 1 << 30)
    cached = cache.open(files, 1)
    cached.write(NAME, 0, memoryview(bytes(64 * 32 * 4)))
    cached.close()
    again: CachedFolder = cache.open(files, 1)
    assert not any(again.present[NAME])
    again.write(NAME, 0, memoryview(bytes(range(256)) * 32))
    again.save()
    again.close()
    last = cache.open(files, 1)
    assert list(last.present[NAME]) == [1]
    assert last.read(NAME, 0) == bytes(range(256)) * 32
    last.close()
