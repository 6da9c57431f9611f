"""Manifests of clients: only valid ones are written, and nothing of them is executed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.train.tasks.written import write_language_model
from thinpipe.train.resolve import resolve
from thinpipe.train.running import Capture, RunOptions
from thinpipe.train.serve.model_cache import ModelCache
from thinpipe.train.serve.model_files import (
    check_settings,
    describe_files,
    place_files,
    place_running,
    place_settings,
)
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.options import Source
from thinpipe.train.tasks.tasks import task

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home") / "model"
    write_language_model(folder, "a client keeps the first and the last layers. " * 20)
    return folder


@pytest.fixture(scope="module")
def manifest(model: Path) -> dict[str, Any]:
    made = describe_files(Source(model=str(model))).manifest()
    assert json.loads(json.dumps(made)) == made
    return made


def entry(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["folders"]["model"]
    return found


def rename(name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        entry(manifest)["files"][name] = entry(manifest)["files"].pop("config.json")

    return change


def add_tensor(name: str, spec: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: entry(manifest)["tensors"].update({name: spec})


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"file {name!r}": rename(name) for name in ("../config.json", "/etc/passwd", "model.py", "", ".", "a\0b", "CON")
    },
    "another file": lambda manifest: entry(manifest)["files"].update({"modeling.py": "import os"}),
    "a million files": lambda manifest: entry(manifest)["files"].update({str(n): "" for n in range(1_000_000)}),
    "a huge file": lambda manifest: entry(manifest)["files"].update({"config.json": " " * (5 << 20)}),
    "no text": lambda manifest: entry(manifest)["files"].update({"config.json": ["a"]}),
    "many tensors": lambda manifest: entry(manifest)["tensors"].update(
        {f"t{n}": [[1], "int8"] for n in range(200_001)}
    ),
    "metadata as a tensor": add_tensor("__metadata__", [[1], "int8"]),
    "a name of control characters": add_tensor("a\x1b[2J", [[1], "int8"]),
    "a name without end": add_tensor("a" * 513, [[1], "int8"]),
    "negative": add_tensor("a", [[-1, -5], "int8"]),
    "petabytes": add_tensor("a", [[1 << 40, 1 << 40], "float64"]),
    "petabytes in all": lambda manifest: [add_tensor(f"a{n}", [[1 << 45], "int8"])(manifest) for n in range(3)],
    "petabytes of nothing": add_tensor("a", [[0, 1 << 46, 1 << 46], "int8"]),
    "true as a size": add_tensor("a", [[True], "int8"]),
    "a fraction as a size": add_tensor("a", [[1.5], "int8"]),
    "a hundred dimensions": add_tensor("a", [[1] * 100, "int8"]),
    "no dtype": add_tensor("a", [[1], "load"]),
    "a list as a dtype": add_tensor("a", [[1], ["int8"]]),
    "offsets": add_tensor("a", {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}),
    "overlapping offsets": add_tensor("a", [[1], "int8", [0, 1]]),
    "a folder of another name": lambda manifest: manifest["folders"].update({"../../home": entry(manifest)}),
    "a field": lambda manifest: entry(manifest).update({"offsets": {}}),
    "no fields": lambda manifest: manifest["folders"].update({"model": {}}),
    "a hash that is a path": lambda manifest: entry(manifest)["identity"].update({"weights": "../../../etc"}),
    "a digest that is none": lambda manifest: entry(manifest).update({"digest": "x" * 5000}),
    "folders in a list": lambda manifest: manifest.update({"folders": [entry(manifest)]}),
    "another format": lambda manifest: manifest.update({"format": 2}),
    "a format that is no number": lambda manifest: manifest.update({"format": "1"}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_manifest_is_checked_before_anything_is_written(
    tmp_path: Path, manifest: dict[str, Any], change: Callable[[dict[str, Any]], Any]
) -> None:
    made = copy.deepcopy(manifest)
    change(made)
    cache = ModelCache(tmp_path / "cache", 1 << 40)
    with pytest.raises(ValueError, match="manifest") as error:
        place_files(made, cache, [], worker=1)
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "cache"]


@pytest.mark.parametrize("value", [None, [], "manifest", 5, {"format": 1}])
def test_what_is_no_manifest(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="the manifest should have the fields format, folders"):
        place_files(value, ModelCache(tmp_path, 1), [], worker=1)


def test_code_in_a_description_is_not_run(tmp_path: Path, manifest: dict[str, Any]) -> None:
    made = copy.deepcopy(manifest)
    facts = json.loads(entry(made)["files"]["config.json"]) | {"auto_map": {"AutoConfig": "evil.Config"}}
    entry(made)["files"]["config.json"] = json.dumps(facts)
    placed = place_files(made, ModelCache(tmp_path, 1 << 30), [], worker=1)
    given = place_settings({"model": "here"}, placed)
    with pytest.raises(ValueError, match="comes with it, and thinpipe runs none from a model's folder"):
        task("lm").init_on_meta(Source(**given))
    placed.close()
    with pytest.raises(ValueError, match="is code of the hub"):
        task("lm").init_on_meta(Source(config="llama", config_set="_attn_implementation=org/kernel"))


@pytest.mark.parametrize(
    "given",
    [
        {"task": "os:system"},
        {"model": "tests.train.toy:ToyTask"},
        {"config": "os.path:join"},
        {"compress_forward": "evil.module:Codec"},
        {"compress_backward": "evil:Codec"},
        {"compress": "evil:Codec:4"},
        {"tokenizer": "evil:load"},
        {"model": "m", "trust_remote_code": True},
    ],
)
def test_code_of_a_client_is_rejected(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="servers run no code of a client"):
        check_settings(given)


def test_codecs_of_thinpipe_are_accepted() -> None:
    for spec in ("tile:4+sr", "sort:6+2", "gauss:3+coded", "axes:2.5+now", "8bit", "none"):
        check_settings({"compress": spec, "compress_forward": spec, "task": "lm", "config": "llama"})


@pytest.mark.parametrize("given", [{"parallel": "data"}, {"parallel": "none"}, {"layout": "linear"}])
def test_servers_read_no_data(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="servers get no data"):
        check_settings(given)


def test_settings_have_paths_of_the_server_alone(tmp_path: Path, model: Path, manifest: dict[str, Any]) -> None:
    lm = task("lm")
    own = {"data": Path("/client/data"), "validation": Path("/client/held"), "tokenizer": "/client/tokenizer"}
    settings = resolve({"task": "lm", "model": str(model), "lr": 0.5, **own}, lm.defaults, device="cpu")
    placed = place_files(manifest, ModelCache(tmp_path, 1 << 30), [], worker=1)
    found = Settings.from_json(place_settings(settings.to_json(), placed))
    assert found.shared() == settings.shared()
    assert Path(str(found.model)).parent == tmp_path
    assert (found.data, found.validation, found.tokenizer, found.chat_template) == (None,) * 4
    with pytest.raises(ValueError, match="the manifest has no files for adapter"):
        place_settings({"adapter": "/client/adapter"}, placed)
    placed.close()
    with pytest.raises(ValueError, match="the manifest has no files for config"):
        place_settings({"config": "/etc"}, replace(placed, cached={}))
    assert place_settings({"config": "llama", "weights": "/w"}, placed) == {"config": "llama", "weights": None}


def test_options_of_a_run_have_no_paths_of_the_client(tmp_path: Path) -> None:
    running = RunOptions(
        save=tmp_path / "run",
        resume=tmp_path / "run",
        export=tmp_path / "out",
        trace=tmp_path / "trace.png",
        capture=Capture(path=tmp_path / "capture.safetensors"),
        activation_cache=tmp_path,
        keep=3,
    )
    found = place_running(running)
    assert str(tmp_path) not in repr(found)
    assert found.save_local
    assert found.shared() == replace(running, save_local=True).shared()
    assert place_running(RunOptions()) == RunOptions()
    assert found.save is not None
    with pytest.raises(OSError, match="Not a directory"):
        found.save.mkdir(parents=True)


def test_files_that_servers_do_not_take(tmp_path: Path, model: Path) -> None:
    import shutil

    import torch

    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="weights are read from safetensors files"):
        describe_files(Source(model=str(folder)))
    save_file({"a b": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"has a tensor 'a b' of type F32, which servers do not take"):
        describe_files(Source(model=str(folder)))
    save_file({"a": torch.zeros(3, dtype=torch.complex64)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"has a tensor 'a' of type C64, which servers do not take"):
        describe_files(Source(model=str(folder)))
