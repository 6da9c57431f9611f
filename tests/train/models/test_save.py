"""The folder of a model: what ``save_pretrained`` writes, from tensors that come one by one; whole, or not there."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from thinpipe.train.models.save import ModelFolder, ModelForm, check_new_folder
from thinpipe.train.tasks.mobilenet import new_mobilenet
from thinpipe.train.tasks.task import Shape

LAYERS = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
CAUSAL = {**LAYERS, "num_key_value_heads": 2, "vocab_size": 99}
TOKENS = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
MODELS = {
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**CAUSAL, num_local_experts=4)),  # fused, stored one by one
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99)),  # tied
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**CAUSAL, head_dim=8)),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**LAYERS, vocab_size=99)),
    "resnet": lambda: ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
    "mobilenet": lambda: new_mobilenet(Shape(classes=5, image_size=96), 0.35),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def write(path: Path, model: nn.Module, **options: int) -> ModelForm:
    form = ModelForm(model, **options)
    with ModelFolder(path, form) as folder:
        for name, tensor in reversed(model.state_dict().items()):
            folder.put(name, tensor)
    return form


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_the_library_writes_and_loads(name: str, tmp_path: Path) -> None:
    model = made(name)
    write(tmp_path / "ours", model, shard_bytes=20_000)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    ours, theirs = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    for file in ("config.json", "generation_config.json"):
        written = [tmp_path / folder / file for folder in ("ours", "theirs") if (tmp_path / folder / file).exists()]
        assert len({path.read_text() for path in written}) == (0 if not written else 1)
        assert len(written) in (0, 2)
    again, report = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    inputs = IMAGES if "pixel_values" in model.main_input_name else TOKENS
    with torch.no_grad():
        torch.testing.assert_close(again(inputs).logits, model(inputs).logits, rtol=1e-5, atol=1e-5)


def test_an_index_has_the_file_of_every_tensor(tmp_path: Path) -> None:
    form = write(tmp_path / "model", made("gemma2"), shard_bytes=20_000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(form.files) > 3
    for file in form.files:
        assert {name for name in index["weight_map"] if index["weight_map"][name] == file} == set(
            load_file(tmp_path / "model" / file)
        )
    assert index["metadata"]["total_size"] == 4 * index["metadata"]["total_parameters"] == 4 * form.parameters


def test_no_more_than_a_block_waits_to_be_converted(tmp_path: Path) -> None:
    model = made("experts")
    form, most = ModelForm(model), 0
    with ModelFolder(tmp_path / "model", form) as folder:
        for name, tensor in model.state_dict().items():
            folder.put(name, tensor)
            most = max(most, sum(len(group) for group in folder._waiting.values()))
    assert most == sum(".layers.0." in name for name in form.tensors) - 1


@pytest.mark.parametrize("kind", ["sequential", "small mobilenet"])
def test_a_model_without_a_config_becomes_weights_alone(kind: str, tmp_path: Path) -> None:
    """For small images thinpipe's MobileNetV2 has other dilations than its config can say."""

    def build() -> nn.Module:
        if kind == "sequential":
            return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        return new_mobilenet(Shape(classes=10, image_size=32), 0.35)

    model, other = build().eval(), build().eval()
    write(tmp_path / "model", model, shard_bytes=100)
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    load_model(other, tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, calls = os.pwrite, []

    def full(handle: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'model'}'"):
        write(tmp_path / "model", made("gpt2"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"transformer.wte.weight": torch.zeros(3)}, r"transformer.wte.weight of GPT2LMHeadModel is float32\[99, 32\]"),
        ({"other": torch.zeros(3)}, "GPT2LMHeadModel has no tensor other"),
        ({}, "transformer.wte.weight of GPT2LMHeadModel is missing"),
    ],
    ids=["shape", "name", "missing"],
)
def test_tensors_of_another_model_are_refused(wrong: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    model = made("gpt2")
    rest = {name: tensor for name, tensor in model.state_dict().items() if "wte" not in name and "head" not in name}

    def put_all() -> None:
        with ModelFolder(tmp_path / "model", ModelForm(model)) as folder:
            for name, tensor in (rest | wrong).items():
                folder.put(name, tensor)

    with pytest.raises(ValueError, match=message):
        put_all()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_runs_are_removed_and_user_files_are_not(tmp_path: Path) -> None:
    left = tmp_path / ".model.thinpipe-export"
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", made("gpt2"))  # an empty folder may be there
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    for path, message in (
        (tmp_path / "model", "is there and not empty"),
        (tmp_path / "model" / "config.json", "is something else"),
        (Path("/proc"), "is a mounted disk"),
    ):
        with pytest.raises(ValueError, match=message):
            check_new_folder(path)
    with pytest.raises(OSError, match="not empty"):  # it came to be there while a run went on
        write(tmp_path / "model", made("gpt2"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
