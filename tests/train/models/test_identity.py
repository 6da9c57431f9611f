"""The identity of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.tasks.written import write_language_model
from thinpipe.train.models.identity import folder_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_language_model(tmp_path / "model", "a text " * 50)
    return tmp_path / "model"


def test_location_and_writer_of_a_folder_do_not_matter(folder: Path) -> None:
    before = folder_identity(folder, weights=True)
    moved = folder.rename(folder.with_name("moved"))
    described = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(described | {"_name_or_path": "x", "transformers_version": "0"}))
    assert folder_identity(moved, weights=True) == before
    assert before.keys() == {"config.json", "weights"}


def test_the_files_that_weights_are_in_do_not_matter(folder: Path) -> None:
    before = folder_identity(folder, weights=True)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert folder_identity(folder, weights=True) == before


def test_other_values_shapes_and_descriptions_are_seen(folder: Path) -> None:
    before, file = folder_identity(folder, weights=True), folder / "model.safetensors"
    tensors = load_file(file)
    norm = "model.norm.weight"
    for changed in (tensors[norm] + 1, tensors[norm][:-1], tensors[norm].bfloat16(), torch.tensor(1.0)):
        save_file(tensors | {norm: changed.contiguous()}, file)
        here = folder_identity(folder, weights=True)
        assert here["config.json"] == before["config.json"]
        assert here["weights"] != before["weights"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert folder_identity(folder, weights=False).keys() == {"config.json"}
    assert folder_identity(folder, weights=False)["config.json"] != before["config.json"]


def test_a_file_that_is_none_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 8)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        folder_identity(folder, weights=True)
