"""Which models come in: from scratch, by a function, from the hub's cache, with code of their own."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.train.tasks.written import SENTENCES, write_language_model
from tests.train.toy import Recorder, settings_for, world_in
from thinpipe.cli.app import app
from thinpipe.train.models.save import ModelFolder, ModelForm
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks import hub, lm
from thinpipe.train.tasks.corpus import read_texts
from thinpipe.train.tasks.sources import parse_changes
from thinpipe.train.tasks.task import Source
from thinpipe.train.tasks.tasks import task
from thinpipe.train.worker import train

LM = task("lm")
TEXT = "".join(f"{number}: {SENTENCES[number % 4]}.\n" for number in range(400))
TINY = "hidden_size=32,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,intermediate_size=64"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.reachable.cache_clear()
    yield
    hub.reachable.cache_clear()
    hub.fetch_model.cache_clear()


def scratch(data: Path, **options: Any) -> Source:
    return Source(**{"config": "llama", "config_set": TINY, "data": data, "tokens": 16} | options)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("hidden_size=256, num_hidden_layers=4", {"hidden_size": 256, "num_hidden_layers": 4}),
        ('layer_types=["a","b"],x=1e-5', {"layer_types": ["a", "b"], "x": 1e-5}),
        ("hidden_act=gelu,tie_word_embeddings=True", {"hidden_act": "gelu", "tie_word_embeddings": True}),
        ("rope_scaling=null,name=4bit", {"rope_scaling": None, "name": "4bit"}),
    ],
)
def test_changes_of_a_config(text: str, changes: dict[str, Any]) -> None:
    assert parse_changes(text) == changes


def test_a_tokenizer_is_trained_on_the_text_and_the_model_follows_it(data: Path, tmp_path: Path) -> None:
    LM.preflight(scratch(data))
    found, shape = LM.load(scratch(data, vocabulary=300))
    assert shape.vocabulary == shape.classes == 300
    assert shape.special == [0, 0, None]
    model: Any = LM.build(shape, scratch(data))
    assert model.get_input_embeddings().weight.shape == (300, 32)
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (0, 0, None)
    assert LM.load(scratch(data, vocabulary=300))[0].companions == found.companions  # the same every time
    for name, content in found.companions.items():
        (tmp_path / name).write_bytes(content)
    # As a run goes on with it: the same tokens, and a model of the same size.
    again, same = LM.load(scratch(data, tokenizer=str(tmp_path)))
    assert same == shape
    assert torch.equal(again.train.stream, found.train.stream)  # type: ignore[attr-defined]
    elsewhere = scratch(data, tokenizer="/on/the/client")  # servers need none
    assert LM.build(shape, elsewhere).config.vocab_size == 300  # type: ignore[union-attr]
    from transformers import AutoTokenizer

    kept = AutoTokenizer.from_pretrained(tmp_path)
    assert kept.decode(kept("größer, or 大?")["input_ids"]) == "größer, or 大?"


def test_no_more_tokens_than_the_text_has_pairs_for(data: Path) -> None:
    _, shape = LM.load(scratch(data))
    assert 257 < shape.classes < 700


def test_weights_next_to_a_config_are_not_read(data: Path, tmp_path: Path) -> None:
    """A folder with its own tokenizer keeps its vocabulary."""
    write_language_model(tmp_path / "model", TEXT)
    (tmp_path / "model" / "model.safetensors").unlink()
    source = scratch(data, config=str(tmp_path / "model"), config_set="num_hidden_layers=5")
    LM.preflight(source)
    found, shape = LM.load(source)
    model: Any = LM.build(shape, source)
    assert (found.companions, shape.special, shape.vocabulary) == ({}, None, 128)
    assert len(model.model.layers) == 5
    load = LM.weight_loader(source, 0)
    assert load is not None
    load(model, ["model.embed_tokens.weight"])
    assert float(model.model.embed_tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config_set": "hidden=3"}, "config_set: the config of a llama has no hidden"),
        ({"config_set": "hidden_size"}, "takes names of the model's config and their values"),
        ({"config_set": "hidden_size=abc"}, "with hidden_size=abc cannot be read .* expected int, got str"),
        ({"config": "vit"}, "causal language models of transformers are trained here; 'vit' is none"),
        ({"config": "lama"}, "config lama is no folder here and no model type of transformers, and as a name of the"),
        ({"config": None, "model": "no/such"}, "model no/such is no folder here, and as a name of the hub it is not"),
        *(
            (
                {"config": None, "model": name},
                f"model is a folder or a name of the hub, as in org/name, and {name} is no",
            )
            for name in ("/no/such", "model/", "org/model/", "./model", "a/b/c", "~/model")
        ),
        ({"tokenizer": "."}, "cannot be read as a tokenizer"),
        ({"config": "gpt2", "config_set": None, "tokens": 2000}, "tokens 2000 are more than the 1024 positions"),
        ({"vocabulary": 300, "tokenizer": "."}, "vocabulary is of a tokenizer that is trained"),
        ({"data": Path("hub:name")}, "hub:org/name, or hub:org/name/part, is a data set of the hub"),
        ({"data": Path("hub:org/name")}, "the data set org/name is not on this machine"),
    ],
)
def test_invalid_names_are_reported_before_workers_start(
    options: dict[str, Any], message: str, data: Path, no_network: None
) -> None:
    with pytest.raises(ValueError, match=message):
        LM.preflight(scratch(**{"data": data, **options}))


def test_a_model_in_the_cache_of_the_hub(
    data: Path, tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models--org--small"
    write_language_model(folder / "snapshots" / "abc", TEXT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    source = Source(model="org/small", data=data, tokens=16)
    LM.preflight(source)
    assert LM.load(source)[1].vocabulary == 128


def test_a_data_set_as_on_the_hub(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "part").mkdir()
    for split, texts in (("train", ["one", "", "two"]), ("validation", ["three"])):
        rows = datasets.Dataset.from_dict({"text": texts})
        rows.to_parquet(tmp_path / "part" / f"{split}-00000-of-00001.parquet")
    datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"
    assert read_texts(tmp_path / "part") == (["one", "two"], ["three"])
    (tmp_path / "part" / "validation-00000-of-00001.parquet").unlink()
    datasets.Dataset.from_dict({"words": ["one"]}).to_parquet(tmp_path / "part" / "train-00000-of-00001.parquet")
    with pytest.raises(ValueError, match="texts are in a column `text`; it has words"):
        read_texts(tmp_path / "part")


# Functions

FUNCTIONS = """
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(32, 32, batch_first=True)

    def forward(self, states):
        return states + self.inner(states)[0]

def units(): return [nn.Embedding(128, 32), Layer(), Layer(), nn.Linear(32, 128)]
def row(): return nn.Sequential(*units())
def few(): return [nn.Embedding(50, 32), nn.Linear(32, 50)]
def flat(): return [nn.Embedding(128, 32), nn.Flatten(1)]
def broken(): return [nn.Embedding(128, 32), nn.Linear(5, 128)]
def raises(): raise RuntimeError("no luck\\ntoday")
def layer(): return nn.Linear(3, 3)
def mixed(): return [nn.Linear(3, 3), 4]
number = 4

def whole():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                                        intermediate_size=64, vocab_size=128))
"""


@pytest.fixture
def functions(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module in the current directory, and a tokenizer."""
    (tmp_path / "of_a_user.py").write_text(FUNCTIONS)
    write_language_model(tmp_path / "model", TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield data
    sys.modules.pop("of_a_user", None)


def of_function(name: str, data: Path, **options: Any) -> Source:
    given = {"model": f"of_a_user:{name}", "tokenizer": "model", "data": data, "tokens": 16}
    return Source(**given | options)


@pytest.mark.parametrize("name", ["units", "row", "whole"])
def test_a_function_returns_units_or_a_model(name: str, functions: Path) -> None:
    """Trained in one process: units see tokens alone, whatever else a batch has."""
    given = {"model": f"of_a_user:{name}", "tokenizer": "model", "data": str(functions), "tokens": 16, "lr": 0.01}
    recorder, settings = Recorder(), settings_for(LM, None, **given, batch_size=8, parallel="none", samples=64)
    train(LM, settings, RunOptions(), world_in(None), lambda: recorder)
    assert recorder.end is not None
    assert recorder.steps[-1].loss < recorder.steps[0].loss - 0.3
    assert recorder.plan is not None
    assert recorder.plan.holdings[0].units == (5 if name == "whole" else 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "of_a_user:nothing"}, "function names a function .*'of_a_user:nothing' cannot be imported"),
        ({"model": "no_module.at_all:f"}, "cannot be imported: No module named 'no_module'"),
        ({"model": "of_a_user:number"}, "'of_a_user:number' is no function"),
        ({"tokenizer": None}, "is a function, which has no tokenizer: name one with tokenizer"),
    ],
)
def test_errors_of_a_function_found_before_workers_start(
    options: dict[str, Any], message: str, functions: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        LM.preflight(of_function("units", functions, **options))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "of_a_user:raises was called without arguments and raised RuntimeError: no luck$"),
        ("layer", "or a model of transformers; it returned a Linear"),
        ("mixed", "it returned a list with a int in it"),
        ("few", "the tokenizer in model knows 1.. tokens, and the model has embeddings for 50"),
        ("flat", r"should make logits \[N, T, tokens\] of token ids \[N, T\]; for \[1, 16\] they return \[1, 512\]"),
        ("broken", r"for \[1, 16\] they raise RuntimeError: mat1 and mat2"),
    ],
)
def test_wrong_returns_of_a_function_are_one_line(name: str, message: str, functions: Path) -> None:
    LM.preflight(of_function(name, functions))
    with pytest.raises(ValueError, match=message):
        LM.load(of_function(name, functions))


# Code that comes with a model

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-kind"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_if_it_is_trusted(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "model"
    write_language_model(folder, TEXT)
    (folder / "own.py").write_text(CODE)
    facts = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(facts | {"model_type": "own-kind", "auto_map": code}))
    source = Source(model=str(folder), data=data, tokens=16)
    with pytest.raises(ValueError, match="and give trust_remote_code if you trust it"):
        LM.preflight(source)
    trusting = Source(model=str(folder), data=data, tokens=16, trust_remote_code=True)
    LM.preflight(trusting)
    _, shape = LM.load(trusting)  # a small copy is cut and compared
    model = LM.build(shape, trusting)
    assert type(model).__name__ == "OwnModel"
    with ModelFolder(tmp_path / "out", ModelForm(model)) as out:  # and it goes with the model
        out.add(LM.companions(trusting))
        for name, tensor in model.state_dict().items():
            out.put(name, torch.ones(tensor.shape))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(again).__name__ == "OwnModel"
    assert all((tensor == 1).all() for tensor in again.state_dict().values())
    (folder / "config.json").write_text(json.dumps(facts | {"model_type": "own-kind", "auto_map": {"AutoModel": "x"}}))
    with pytest.raises(ValueError, match="describes a 'own-kind'"):
        LM.preflight(trusting)


# The run keeps its tokenizer


def test_a_run_resumes_with_the_tokenizer_it_has_trained(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"config": "llama", "config_set": TINY, "data": str(data), "tokens": 16, "vocabulary": 300}
    settings = settings_for(LM, None, **given, batch_size=8, parallel="none", samples=32, lr=0.01)
    validation: Any = LM.load(settings.source)[0].validation
    runs = tmp_path / "runs"
    out, later = tmp_path / "out", tmp_path / "later"
    rest = RunOptions(save=runs, resume=runs, export=out)
    for recorder, running in ((Recorder(), RunOptions(save=runs, steps=2)), (Recorder(), rest)):
        train(LM, settings, running, world_in(None), lambda recorder=recorder: recorder)  # type: ignore[misc]
        assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in (runs / "tokenizer").iterdir()}
        monkeypatch.setattr(lm, "train_tokenizer", None)  # the second time none is trained
    assert recorder.end is not None
    assert recorder.end.steps == 2
    assert recorder.end.metric == pytest.approx(math.exp(recorder.end.validation_loss))
    nats = recorder.end.validation_loss * len(validation) * 16
    assert recorder.end.bits_per_byte == pytest.approx(nats / math.log(2) / validation.text_bytes)
    done = CliRunner().invoke(app, ["export", str(runs), str(later)])
    assert done.exit_code == 0, done.output
    exported = [{path.name: path.read_bytes() for path in folder.glob("*[!d]")} for folder in (out, later)]  # no .md
    assert exported[0] == exported[1]
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert len(tokenizer) == model.config.vocab_size == 300
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
