"""Prompts and options of generate: what cannot be continued is one line, before any worker starts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.tasks.written import write_language_model
from thinpipe.train.generation.prompts import encode, padded, read_prompts
from thinpipe.train.generation.settings import GenerationSettings

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_language_model(folder, "the client keeps the first and the last layers, the servers have those between. " * 9)
    return folder


def settings(model: Path, **options: Any) -> GenerationSettings:
    return GenerationSettings(**{"model": str(model), "workers": 2, "max_new_tokens": 8, "device": "cpu"} | options)


def test_prompts_are_padded_on_the_left(model: Path) -> None:
    prompts = encode(["the client keeps", "the"], settings(model))
    batch = padded(prompts, 0)
    short = len(prompts[1].tokens)
    assert batch["attention_mask"].sum(1).tolist() == [len(prompt.tokens) for prompt in prompts]
    assert batch["input_ids"][1, -short:].tolist() == prompts[1].tokens
    assert not batch["input_ids"][1, :-short].any()


def test_chat_puts_prompts_into_the_template(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has none: leave it out"):
        encode(["the"], settings(model, chat=True))
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    said, shown = encode(["the"], settings(tmp_path, chat=True)), encode(["<user>the<bot>"], settings(tmp_path))
    assert said[0].tokens == shown[0].tokens
    assert said[0].text == "the"


def test_prompts_of_files_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, objects = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_text("one\n\ntwo\n")
    objects.write_text(json.dumps({"prompt": "one\nand more"}) + "\n")
    assert read_prompts([], lines) == ["one", "two"]
    assert read_prompts([], objects) == ["one\nand more"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped,\nin two lines\n"))
    assert read_prompts([], None) == ["piped,\nin two lines"]
    with pytest.raises(ValueError, match="was piped in is empty"):
        read_prompts([], None)
    objects.write_text('{"text": "one"}\n')
    with pytest.raises(ValueError, match="line 1 should be an object with a text 'prompt'"):
        read_prompts([], objects)
    with pytest.raises(ValueError, match="leave one of them out"):
        read_prompts(["one"], lines)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "prompt 1 is empty"), ("the client " * 40, "64 positions, and prompt 1 has .* tokens with 8 to come")],
    ids=["empty", "too long"],
)
def test_prompts_that_cannot_be_continued(prompt: str, message: str, model: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        encode([prompt], settings(model))
    assert len(str(error.value).splitlines()) == 1


def test_a_model_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"cannot be read as a tokenizer: .*; save the model's own there") as error:
        encode(["the"], settings(tmp_path))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "are for sampling"),
        ({"compare": True}, "holds a codec against none"),
        ({"compress": "2bit"}, "axes:2.5 learns .*, as in 4bit or gauss:3; got 2bit"),
        ({"compress": "5bit"}, "there is no recipe '5bit'"),
        ({"workers": 1}, "a pipeline has 2 workers or more"),
        ({"parallel": "none"}, "is one worker, got 2"),
        ({"parallel": "none", "workers": None, "compress": "8bit"}, "is one process"),
        ({"temperature": 0}, "is above 0"),
        ({"device": "cpu,cpu,cpu"}, "names more than the 2 workers"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str, model: Path) -> None:
    with pytest.raises(ValueError, match=message):
        settings(model, **options)
