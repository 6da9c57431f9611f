"""Task lm: a model of transformers and text files in, refused in one line where they do not fit."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from tests.train.tasks.written import write_language_model
from thinpipe.train.tasks.task import IGNORED, Source
from thinpipe.train.tasks.tasks import task

LM = task("lm")
TEXT = "the client keeps the first and the last layers, the servers have those between. " * 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_language_model(tmp_path / "model", TEXT)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def source(folder: Path, **options: object) -> Source:
    return Source(**{"model": str(folder / "model"), "data": folder / "text.txt", "tokens": 16} | options)


def test_windows_of_the_text_and_a_model_without_weights(folder: Path) -> None:
    LM.preflight(source(folder))
    data, shape = LM.load(source(folder))
    batch = data.train.batch(torch.tensor([0, 1]))
    assert batch.inputs[0].shape == batch.labels.shape == (2, 16)
    assert torch.equal(batch.inputs[0][:, 1:], batch.labels[:, :-1])
    assert int(batch.inputs[0].max()) < shape.classes
    model = LM.build(shape, source(folder))
    assert all(parameter.is_meta for parameter in model.parameters())


def change(folder: Path, **facts: object) -> None:
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def put_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "model" / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model" / "config.json").write_text("[]"), "it is no object"),
        (lambda folder: (folder / "model" / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda folder: change(folder, auto_map={"AutoModel": "code.Model"}), "comes with it, .* trust_remote_code"),
        (lambda folder: change(folder, model_type="vit"), "describes a 'vit'"),
        (lambda folder: change(folder, num_hidden_layers=10**9), "num_hidden_layers is at most 20000, got 1000000000"),
        (lambda folder: change(folder, intermediate_size=10**13), r"gate_proj.weight takes .* [TP]B or more, and this"),
        (lambda folder: change(folder, intermediate_size=2**62), "Storage size calculation overflowed"),
        (lambda folder: change(folder, attn_implementation="evil/kernel"), '"evil/kernel" is code of the hub'),
        (lambda folder: put_fifo(folder / "model" / "tokenizer_config.json"), "it is a pipe"),
        (lambda folder: put_fifo(folder / "model" / "generation_config.json"), "it is a pipe"),
        (lambda folder: os.truncate(folder / "model" / "tokenizer.json", 1 << 40), "it has 1.1 TB, more than 100 MB"),
        (lambda folder: change(folder, vocab_size=7), "they are not of one model"),
        (lambda folder: (folder / "model" / "tokenizer.json").write_text("{"), "a tokenizer"),
        (lambda folder: (folder / "text.txt").write_bytes(b""), "all are empty"),
        (lambda folder: (folder / "text.txt").write_bytes(b"\x00\x01"), "zero bytes"),
        (lambda folder: (folder / "text.txt").write_bytes(b"caf\xe9"), "not text in UTF-8"),
        (lambda folder: (folder / "text.txt").unlink(), "a file or a folder"),
    ],
)
def test_bad_input_is_one_line_before_there_are_workers(spoil: object, message: str, folder: Path) -> None:
    spoil(folder)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message) as error:
        LM.preflight(source(folder))
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(ValueError, match=message):  # on several machines nobody has looked before
        loaded(folder)


def loaded(folder: Path) -> None:
    _, shape = LM.load(source(folder))
    model = LM.build(shape, source(folder))
    load = LM.weight_loader(source(folder), 0)
    assert load is not None
    load(model, ["model.norm.weight"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: change(folder, model_type="hrm_text"), "share their weights"),
        (lambda folder: (folder / "text.txt").write_text("short"), "is too short"),
    ],
)
def test_errors_that_need_reading_are_reported_by_the_client(spoil: object, message: str, folder: Path) -> None:
    spoil(folder)  # type: ignore[operator]
    LM.preflight(source(folder))
    with pytest.raises(ValueError, match=message) as error:
        LM.load(source(folder))
    assert len(str(error.value).splitlines()) == 1


def test_model_and_data_are_required(folder: Path) -> None:
    for missing in ("model", "data"):
        with pytest.raises(ValueError, match="task lm trains your own model"):
            LM.preflight(source(folder, **{missing: None}))


def test_packed_documents_restart_positions_and_have_no_labels_across(folder: Path) -> None:
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"document {n} " + "has layers " * (n % 5)}) + "\n" for n in range(80))
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save_pretrained(folder / "model")
    found = source(folder, data=folder / "text.jsonl")
    plain, packed = LM.load(found)[0].train, LM.load(replace(found, packing=True))[0].train
    assert (len(plain), LM.defaults.packing) == (len(packed), False)
    every = torch.arange(len(plain))
    (ids,), labels = plain.batch(every).inputs, plain.batch(every).labels
    (same, positions), masked = packed.batch(every).inputs, packed.batch(every).labels
    assert torch.equal(ids, same)
    ends = ids == 1  # </s>
    assert bool((positions[:, 0] == 0).all())
    assert bool((positions[:, 1:] == torch.where(ends[:, :-1], 0, positions[:, :-1] + 1)).all())
    assert torch.equal(masked, torch.where(ends, IGNORED, labels))
    firsts = "".join(tokenizer.convert_ids_to_tokens(labels[ends].tolist()))
    assert plain.text_bytes - packed.text_bytes == len(firsts) > 0
