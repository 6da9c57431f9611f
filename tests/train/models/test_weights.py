"""A worker has the weights of its own units, whoever made them and however they are stored."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from thinpipe.train.models.weights import load_weights, params_on_meta, random_weights, weight_files

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
}


def make(kind):
    torch.manual_seed(0)
    if kind == "experts":  # which are stored one by one and kept as one tensor
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))


def meta_copy(model):
    with params_on_meta():
        return type(model)(model.config)


@pytest.mark.parametrize("kind", ["experts", "tied"])
def test_only_wanted_tensors_are_read(kind, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    copy = meta_copy(model)
    assert all(parameter.is_meta for parameter in copy.parameters())
    wanted = [name for name in copy.state_dict() if ".layers.1." in name]
    load_weights(copy, tmp_path, wanted)
    there = {name for name, tensor in copy.state_dict().items() if not tensor.is_meta}
    assert there == set(wanted)
    assert all(torch.equal(copy.state_dict()[name], model.state_dict()[name]) for name in wanted)


@pytest.mark.parametrize("kind", ["experts", "tied"])
def test_a_complete_model_is_the_saved_one(kind, tmp_path):
    model = make(kind).eval()
    model.save_pretrained(tmp_path)
    with params_on_meta():
        copy = type(model)(AutoConfig.from_pretrained(tmp_path))
    load_weights(copy, tmp_path, copy.state_dict())
    tokens = torch.randint(0, 99, (2, 7))
    assert torch.equal(copy.eval()(tokens).logits, model(tokens).logits)


def test_random_weights_do_not_depend_on_the_worker():
    whole, part = meta_copy(make("tied")), meta_copy(make("tied"))
    random_weights(whole, whole.state_dict(), seed=3)
    wanted = [name for name in part.state_dict() if ".layers.2." in name]
    random_weights(part, wanted, seed=3)
    assert all(torch.equal(part.state_dict()[name], whole.state_dict()[name]) for name in wanted)
    assert {name for name, tensor in part.state_dict().items() if not tensor.is_meta} == set(wanted)
    first, second = (whole.state_dict()[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)
    assert first.std() == pytest.approx(whole.config.initializer_range, rel=0.1)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight


def test_files_that_do_not_fit_are_named(tmp_path):
    model = make("tied")
    copy = meta_copy(model)
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load_weights(copy, tmp_path, copy.state_dict())
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    (tmp_path / files["model.norm.weight"]).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=f"{files['model.norm.weight']} cannot be read"):
        load_weights(copy, tmp_path, copy.state_dict())


OUTSIDE = "../good/model.safetensors"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is no index of weights: weight_map should name files"),
        ('{"weight_map": []}', "is no index of weights: weight_map should name files"),
        ('{"weight_map": {}}', "is no index of weights: weight_map should name files"),
        ('{"weight_map": {"a": 5}}', "names files of its own folder, got 5; "),
        (json.dumps({"weight_map": {"a": OUTSIDE}}), f"names files of its own folder, got '{OUTSIDE}'; "),
        ('{"weight_map": {"a": "/etc/passwd"}}', "names files of its own folder, got '/etc/passwd'; "),
        ('{"weight_map": {"a": "\\u001b[2J"}}', r"names files of its own folder, got '\x1b[2J'; "),
        (json.dumps({"weight_map": {"a": "n" * 5000}}), f"names files of its own folder, got '{'n' * 59}; "),
        ('{"weight_map": {"a": ".."}}', "has no .."),
        ("[" * 200_000, "cannot be read as an index of weights: brackets are nested too deeply; "),
    ],
)
def test_indexes_that_name_no_files_of_their_folder_are_refused(tmp_path, content, message):
    make("tied").save_pretrained(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="model") as error:
        weight_files(tmp_path / "bad")
    (line,) = str(error.value).splitlines()
    assert str(tmp_path / "bad") in line
    assert message in line


def test_files_of_weights_may_be_links_as_in_caches(tmp_path):
    model = make("tied")
    model.save_pretrained(tmp_path / "blobs", max_shard_size="20KB")
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate(sorted((tmp_path / "blobs").iterdir())):
        blob = file.rename(file.with_name(f"{number:040x}"))
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..", "blobs", blob.name))
    assert len(weight_files(tmp_path / "snapshot")) > 1
    copy = meta_copy(model)
    load_weights(copy, tmp_path / "snapshot", copy.state_dict())
    assert torch.equal(copy.model.norm.weight, model.model.norm.weight)
