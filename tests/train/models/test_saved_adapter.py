"""Adapters that peft saved: put on a model they compute what peft computes; what is not plain LoRA, or not the model's,
is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thinpipe.train.models.adapters import adapter_names
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.models.tiny import shrunken
from thinpipe.train.models.weights import params_on_meta, random_weights

TOKENS = torch.arange(10, 22).reshape(2, 6)
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
QUERY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def built(kind: str, builder: str = "AutoModelForCausalLM") -> Any:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, builder).from_config(shrunken(transformers.AutoConfig.for_model(kind))).eval()


def write_adapter(folder: Path, model: nn.Module, **facts: Any) -> Path:
    """As peft writes it, with random values."""
    adapted = get_peft_model(model, LoraConfig(r=4, **facts))
    with torch.no_grad():
        for name, each in adapted.named_parameters():
            if each.requires_grad and "original_module" not in name:
                each.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), built("llama"), target_modules=["q_proj", "v_proj"])


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


@pytest.mark.parametrize(
    ("kind", "builder", "facts"),
    [
        ("llama", "AutoModelForCausalLM", {"target_modules": r".*\.1\..*(q|down)_proj", "use_rslora": True}),
        (
            "gpt2",
            "AutoModelForCausalLM",
            {"target_modules": ["c_attn", "c_proj"], "lora_alpha": 3, "fan_in_fan_out": True},
        ),
        ("qwen2", "AutoModelForCausalLM", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}),
        ("roberta", "AutoModelForSequenceClassification", {"target_modules": ["dense"], "task_type": "SEQ_CLS"}),
    ],
)
def test_a_model_computes_like_peft(tmp_path: Path, kind: str, builder: str, facts: dict[str, Any]) -> None:
    """peft names a classifier's head ``classifier`` and ``score``, and puts no adapters into it."""
    folder = write_adapter(tmp_path, built(kind, builder), **facts)
    if kind == "roberta":
        assert json.loads((folder / CONFIG).read_text())["modules_to_save"] == ["classifier", "score"]
    model = built(kind, builder)
    before = logits(model)
    expected = logits(PeftModel.from_pretrained(built(kind, builder), folder).eval())
    found = logits(SavedAdapter(folder).put_on(model).model.eval())
    assert (found - before).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_only_requested_tensors_are_read(written: Path, tmp_path: Path) -> None:
    with params_on_meta():
        model = built("llama")
    adapted = SavedAdapter(written).put_on(model)
    load = adapted.loader(lambda model, names: random_weights(model, names, 0))
    assert load is not None
    mine = [name for name in model.state_dict() if ".layers.1." in name]
    load(model, mine)
    held = model.state_dict()
    assert {name for name in adapter_names(model) if not held[name].is_meta} == set(mine) & set(adapter_names(model))
    assert torch.equal(held[QUERY[17:].replace("A.w", "A.default.w")], load_file(written / FILE)[QUERY])


def put(name: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        facts = json.loads((folder / CONFIG).read_text()) | {name: value}
        (folder / CONFIG).write_text(json.dumps(facts))

    return change


def changed(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        change(tensors)
        save_file(tensors, folder / FILE)

    return rewrite


def cut(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-10])


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another kind": (put("peft_type", "IA3"), "takes adapters of LoRA; .* describes 'IA3'"),
    "ranks": (put("rank_pattern", {"q_proj": 8}), "takes plain adapters of LoRA; .* have rank_pattern"),
    "dora": (put("use_dora", True), "takes plain adapters of LoRA; .* have use_dora True: merge them"),
    "bias": (put("bias", "all"), "have bias all"),
    "of the future": (put("use_tomorrow", True), "have use_tomorrow True"),
    "changed base": (put("init_lora_weights", "pissa"), "have init_lora_weights pissa"),
    "embeddings": (put("modules_to_save", ["embed_tokens"]), "has all of model.embed_tokens too"),
    "no names": (put("modules_to_save", 3), "modules_to_save are names; got 3"),
    "the last layer": (put("target_modules", ["lm_head"]), "on the blocks of a model; .* has one on lm_head"),
    "no such layers": (put("target_modules", ["c_attn"]), "do not fit LlamaForCausalLM: .* not found in the base"),
    "another rank": (put("r", 8), r"lora_A.weight is \[4, 64\], and \[8, 64\] would fit; name the model"),
    "too large": (put("r", 10**12), "r, the rank of adapters, is from 1 to 4096; got 1000000000000"),
    "nonsense": (put("lora_alpha", "x"), "do not fit LlamaForCausalLM: "),
    "missing": (changed(lambda tensors: tensors.pop(QUERY)), "q_proj.lora_A.weight is missing in its file"),
    "more": (changed(lambda tensors: tensors.update(x=torch.ones(1))), "the model has no place for x"),
    "whole numbers": (
        changed(lambda tensors: tensors.update({QUERY: tensors[QUERY].int()})),
        "lora_A.weight has no floats, it is I32",
    ),
    "damaged": (cut, f"{FILE} cannot be read as adapters: .*; bring the file that peft wrote"),
    "no file": (lambda folder: (folder / FILE).unlink(), f"wrote; .* has no {FILE}"),
    "no description": (lambda folder: (folder / CONFIG).unlink(), f"wrote; .* has no {CONFIG}"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "cannot be read as the description of adapters"),
    "no object": (lambda folder: (folder / CONFIG).write_text("[]"), "it is no object"),
}


def test_a_giant_file_is_refused_before_it_is_hashed(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "adapter")
    with (tmp_path / "adapter" / FILE).open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ValueError, match=f"{FILE} cannot be read as adapters: "):
        SavedAdapter(tmp_path / "adapter").digest()


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_adapters_are_rejected(written: Path, tmp_path: Path, name: str) -> None:
    change, line = REFUSED[name]
    shutil.copytree(written, tmp_path / "adapter")
    change(tmp_path / "adapter")
    with params_on_meta():
        model = built("llama")
    with pytest.raises(ValueError, match=line) as refused:
        SavedAdapter(tmp_path / "adapter").put_on(model)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"base_model_name_or_path": ""}, "does not name the model that its adapters are for: name the"),
        ({"base_model_name_or_path": "/nowhere/llama"}, "are for /nowhere/llama, which is no folder here: name the"),
        ({"base_model_name_or_path": "os:getcwd"}, "are for os:getcwd, which is no folder here"),
        ({"base_model_name_or_path": "a/b", "revision": "v2"}, "are for a/b as of v2: get that, and name the model"),
    ],
)
def test_a_model_that_is_not_here(written: Path, tmp_path: Path, facts: dict[str, Any], line: str) -> None:
    shutil.copytree(written, tmp_path / "adapter")
    for name, value in facts.items():
        put(name, value)(tmp_path / "adapter")
    with pytest.raises(ValueError, match=line):
        SavedAdapter(tmp_path / "adapter").completed({})
    assert SavedAdapter(tmp_path / "adapter").completed({"model": "mine"}) == {"model": "mine"}


def test_units_of_ones_own_take_none(written: Path) -> None:
    with pytest.raises(ValueError, match="adapter is for models of transformers, and this is a Sequential"):
        SavedAdapter(written).put_on(nn.Sequential(nn.Linear(2, 2)))
