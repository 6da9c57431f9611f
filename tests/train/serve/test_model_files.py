"""Servers without files do what servers with files do, and receive the layers that they hold."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.train.serve.runs import FILES, Offer, evaluate_with, generate_with, layer_bytes, train_with
from tests.train.tasks.written import write_glue, write_language_model, write_roberta, write_text_classifier
from thinpipe.system.sizes import size_text
from thinpipe.train.checkpoints.folder import checkpoints, newest
from thinpipe.train.running import RunOptions

TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60
BLOCKS = ((0,), (1, 2)), ((0, 1), (2,))  # of two servers: how three layers may be distributed


@pytest.fixture(scope="module", params=["one file, tied", "shards"])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("home")
    write_language_model(folder / "model", TEXT, tied=request.param != "shards")
    if request.param == "shards":
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        (folder / "model" / "model.safetensors").unlink()
        model.save_pretrained(folder / "model", max_shard_size="40KB")
        assert len(list((folder / "model").glob("model-*.safetensors"))) > 2
    (folder / "text.txt").write_text(TEXT)
    return folder


def given_of(home: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(home / "model"), "data": str(home / "text.txt"), **more}


def data_of(home: Path, **more: Any) -> dict[str, Any]:
    return {**given_of(home), "tokens": 16, "samples": None, "batch_size": 8, "chunks": 2, "compress": "none", **more}


def write_adapter(pool: Pool, home: Path, folder: Path) -> Path:
    given = given_of(home, lora=4, lr=0.02, optimizer="adamw")
    pool.run(train_with, 2, FILES, given, RunOptions(export=folder))
    return folder


@pytest.mark.parametrize("more", [{}, {"lora": 4}, {"dtype": "bfloat16"}], ids=["all", "lora", "bfloat16"])
def test_training(pool: Pool, home: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    """To the bit; a server has all tensors of its layers, and no embeddings and no head."""
    with_files = pool.run(train_with, 3, FILES, given_of(home, **more))
    client, *servers = pool.run(train_with, 3, Offer(caches=tmp_path), given_of(home, **more))
    assert client.result == with_files[0].result
    received = [seen.received["model"] for seen in servers]
    assert received in [[layer_bytes(home / "model", layers) for layers in split] for split in BLOCKS]
    assert client.sent == received
    expected = [
        f"worker {n} needs {size_text(size)} of weights of the model: sending them"
        for n, size in enumerate(received, 1)
    ]
    assert sorted(client.lines) == expected
    for seen, size in zip(servers, received, strict=True):
        assert seen.lines[-1].startswith(f"weights of the model: {size_text(size)} of {size_text(size)}, ")


def test_from_scratch_with_the_description_alone(pool: Pool, home: Path, tmp_path: Path) -> None:
    given = {"config": str(home / "model"), "data": str(home / "text.txt"), "tokenizer": str(home / "model")}
    with_files = pool.run(train_with, 2, FILES, given)[0]
    client, server = pool.run(train_with, 2, Offer(caches=tmp_path), given)
    assert client.result == with_files.result
    assert server.received == {"config": 0}


def test_evaluation_and_generation_with_adapters(pool: Pool, home: Path, tmp_path: Path) -> None:
    adapter = write_adapter(pool, home, tmp_path / "adapter")
    there = Offer(caches=tmp_path / "caches")
    for evaluated in (None, adapter):
        given = data_of(home, model=str(home / "model"))
        with_files = pool.run(evaluate_with, 3, FILES, None, given, evaluated)[0]
        client, *servers = pool.run(evaluate_with, 3, there, None, given, evaluated)
        assert client.result == with_files.result
        if evaluated is not None:
            received = sum(seen.received["adapter"] for seen in servers)
            size = sum(tensor.nbytes for tensor in torch_load(adapter).values())
            assert received == size  # all layers are on servers
            assert [seen.received["model"] for seen in servers] == [0, 0]  # they have them from the evaluation before
    for more in ({}, {"adapter": str(adapter), "compress": "gauss:3"}):
        given = {"model": str(home / "model"), **more}
        texts = pool.run(generate_with, 3, FILES, given)[0].result
        client, *servers = pool.run(generate_with, 3, Offer(caches=tmp_path / f"{len(more)}"), given)
        assert client.result == texts
        layers = [layer_bytes(home / "model", (number,)) for number in range(3)]
        assert sum(seen.received["model"] for seen in servers) == sum(layers)


def torch_load(adapter: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(adapter / "adapter_model.safetensors")


def test_a_classifier_and_its_head(pool: Pool, tmp_path: Path) -> None:
    """A head that the folder does not have is drawn by the client; a task's own checkpoint goes to all in full."""
    write_text_classifier(tmp_path / "bert")
    write_roberta(tmp_path / "roberta")
    write_glue(tmp_path / "rte", "rte")
    small = {"task": "rte", "data": str(tmp_path / "rte"), "epochs": 1, "samples": 16, "tokens": 16}
    for name, more in (
        ("model", {"model": str(tmp_path / "bert")}),
        ("weights", {"weights": str(tmp_path / "roberta")}),
    ):
        given = small | more | ({"client_layers": (1, 1)} if name == "model" else {})
        with_files = pool.run(train_with, 2, FILES, given)[0]
        client, server = pool.run(train_with, 2, Offer(caches=tmp_path / "caches"), given)
        assert client.result == with_files.result
        assert 0 < server.received[name] == client.sent[0]


@pytest.mark.parametrize("home", ["one file, tied"], indirect=True)
def test_checkpoints_stay_with_the_client(pool: Pool, home: Path, tmp_path: Path) -> None:
    """It resumes and is evaluated, with other cuts too, when the client alone has its folder."""
    there, run = Offer(caches=tmp_path / "caches"), tmp_path / "run"
    given = given_of(home, compress="power:2", lora=4)
    whole = pool.run(train_with, 3, there, given)[0].result
    saving = RunOptions(save=run, steps=2)
    pool.run(train_with, 3, there, given, saving)
    assert [path.name for path in checkpoints(run)] == ["step-00000002"]
    assert len(list(newest(run).glob("part-*"))) == 3
    rest = pool.run(train_with, 3, there, given, RunOptions(save=run, resume=run))[0].result
    assert rest[0] == whole[0]
    assert rest[1] == whole[1][2:]
    for workers in (2, 3):
        with_files = pool.run(evaluate_with, workers, FILES, run, {})[0].result
        assert pool.run(evaluate_with, workers, there, run, {})[0].result == with_files
    assert not any(path.name.startswith("step-") for path in (tmp_path / "caches").rglob("*"))


def test_the_same_model_on_the_disk_of_a_server(pool: Pool, home: Path, tmp_path: Path) -> None:
    """It is used where it is; one with other values behind the sketch is not, and the client's are fetched."""
    (tmp_path / "models" / "else").mkdir(parents=True)
    shutil.copytree(home / "model", tmp_path / "models" / "same")
    offer = Offer(caches=tmp_path / "caches", own=(tmp_path / "models",))
    first, server = pool.run(train_with, 2, offer, given_of(home))
    assert (server.received, first.sent) == ({"model": 0}, [0])
    assert any("comparing" in line and str(tmp_path / "models" / "same") in line for line in server.lines)
    flip_a_bit(next(file for file in sorted((tmp_path / "models" / "same").glob("*.safetensors")) if place_in(file)))
    again, server = pool.run(train_with, 2, offer, given_of(home))
    assert again.result == first.result
    assert server.received["model"] == layer_bytes(home / "model", (0, 1, 2))
    assert any(line.endswith("is not used: 1 of 27 tensors differ from the client's") for line in server.lines)


def place_in(file: Path) -> int:
    """Where the first matrix of a layer ends in a file; 0 if it has none."""
    size = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    tensors = json.loads(file.read_bytes()[8:size]).items()
    ends = [facts["data_offsets"][1] for name, facts in tensors if ".layers." in name and "proj" in name]
    return size + ends[0] if ends else 0


def flip_a_bit(file: Path) -> None:
    """Change the last value of a matrix, which a sketch of its first values does not have."""
    content = bytearray(file.read_bytes())
    content[place_in(file) - 1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("home", ["shards"], indirect=True)  # a server keeps them in one file
def test_a_second_run_needs_nothing_and_damage_is_fetched_again(pool: Pool, home: Path, tmp_path: Path) -> None:
    there = Offer(caches=tmp_path)
    first = pool.run(train_with, 2, there, given_of(home))[0]
    second, server = pool.run(train_with, 2, there, given_of(home))
    assert (second.result, server.received) == (first.result, {"model": 0})
    (weights,) = (tmp_path / "1").glob("*/model.safetensors")
    flip_a_bit(weights)
    third, server = pool.run(train_with, 2, there, given_of(home))
    assert third.result == first.result
    assert 0 < server.received["model"] < layer_bytes(home / "model", (0,))
    assert any("1 blocks" in line and "fetching them again" in line for line in server.lines)
    for damaged in ("blocks.json", "model.safetensors", "config.json"):
        os.truncate(weights.with_name(damaged), 20)
        again, server = pool.run(train_with, 2, there, given_of(home))
        assert again.result == first.result
        whole = layer_bytes(home / "model", (0, 1, 2))
        assert server.received["model"] == (0 if damaged == "config.json" else whole)
