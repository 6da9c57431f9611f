"""Folders of models: their config is read once, their weights are those that transformers would load."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import RobertaForSequenceClassification

from tests.train.tasks.written import write_roberta
from thinpipe.options import OptionError
from thinpipe.train.models import pretrained
from thinpipe.train.models.pretrained import PretrainedModel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_roberta(tmp_path / "roberta")


def test_a_config_is_read_once_until_its_file_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [], pretrained.read_description
    monkeypatch.setattr(pretrained, "read_description", lambda *args, **kw: reads.append(args) or read(*args, **kw))
    first, second = (PretrainedModel(folder, "sequence", classes=classes).config() for classes in (2, 5))
    assert (first.num_labels, second.num_labels, len(reads)) == (2, 5, 1)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"num_hidden_layers": 2}))
    model = PretrainedModel(folder, "sequence")
    assert (model.config().num_hidden_layers, model.number("num_hidden_layers"), len(reads)) == (2, 2, 2)


@pytest.mark.parametrize("form", ["safetensors", "pickled", "legacy"])
def test_weights_and_a_new_head_are_those_of_from_pretrained(folder: Path, form: str) -> None:
    if form != "safetensors":
        weights = load_file(folder / "model.safetensors")
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "pickled")
        (folder / "model.safetensors").unlink()
    torch.manual_seed(3)
    wanted = RobertaForSequenceClassification.from_pretrained(folder, num_labels=3).state_dict()
    torch.manual_seed(3)
    found = replace(PretrainedModel(folder, "sequence"), classes=3).with_weights().state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
    assert float(found["classifier.out_proj.weight"].std()) > 0


def test_the_attention_is_the_requested_one_and_transformers_choice_by_default(folder: Path) -> None:
    made = {name: PretrainedModel(folder, "sequence", attention=name) for name in (None, "sdpa", "eager")}
    used = {name: model.with_weights().config._attn_implementation for name, model in made.items()}
    assert used == {None: "sdpa", "sdpa": "sdpa", "eager": "eager"}
    made["eager"].check_weights()
    made["eager"].check_cut()


def test_flash_attention_without_its_package_and_attention_without_support_are_one_line(
    folder: Path, tmp_path: Path
) -> None:
    if find_spec("flash_attn") is None:
        with pytest.raises(OptionError, match="needs the package flash_attn, which is not installed: install it, or"):
            PretrainedModel(folder, "sequence", attention="flash_attention_2").check_weights()
    unsupported = PretrainedModel(None, "causal", model_type="xlnet", has_weights=False, attention="sdpa")
    with pytest.raises(ValueError, match="XLNetLMHeadModel does not support an attention implementation") as raised:
        unsupported.check_weights()
    assert "\n" not in str(raised.value)
