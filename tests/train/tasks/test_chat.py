"""Task chat: answers alone are learnt, whatever the template; what is no example is refused with its line."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoTokenizer

from tests.train.tasks.written import write_language_model
from thinpipe.train.models.pretrained import PretrainedModel
from thinpipe.train.tasks.task import IGNORED, OfText, Source
from thinpipe.train.tasks.tasks import task

CHAT = task("chat")
PLAIN = (
    "{% for message in messages %}<{{ message.role }}>\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<{{ message.role }}>\n{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}</s>\n{% endgeneration %}{% else %}{{ message.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
# Drops what was thought in all answers but the last, as Qwen3's does.
FORGETFUL = (
    "{% for message in messages %}<{{ message.role }}>\n{% if message.role == 'assistant' and loop.last %}thought\n"
    "{% endif %}{{ message.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
ALPHABET = "".join(map(chr, range(32, 127))) + "\n\u00e4\u20ac"


def said(*contents: str) -> dict[str, Any]:
    """A user's word and an answer, in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]}


ROWS = [
    said("what is a stage?", "units on one worker"),
    said("and a link?", "what joins two", "which two?", "\nneighbours, for 5 \u20ac"),
    {"prompt": "a codec is ", "completion": "bytes", "id": 7},
    {"messages": [{"role": "system", "content": "be brief"}, *said("why?", "so", "is that all?")["messages"]]},
]
ANSWERS = [
    ["units on one worker</s>\n"],
    ["what joins two</s>\n", "\nneighbours, for 5 \u20ac</s>\n"],
    ["bytes</s>"],
    ["so</s>\n"],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    write_language_model(folder, ALPHABET)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(folder)
    return folder


def source(model: Path, folder: Path, rows: list[Any], template: str | None = PLAIN, **options: Any) -> Source:
    (folder / "data.jsonl").write_text(
        "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in rows)
    )
    found = Source(model=str(model), data=folder / "data.jsonl", tokens=120)
    if template is not None:
        (folder / "template.jinja").write_text(template)
        found = replace(found, chat_template=folder / "template.jinja")
    return replace(found, **options)


def labelled(found: Source) -> list[list[str]]:
    """Return the labelled texts of every example in the order of the file, consecutive labels joined."""
    data, _ = CHAT.load(found)
    tokenizer = CHAT.tokenizer(CHAT.model(found), found)  # type: ignore[attr-defined]
    told = []
    for split in (data.validation, data.train):  # the first example validates
        batch = split.batch(torch.arange(len(split)))
        ids, mask = batch.inputs
        assert torch.equal(mask.cumprod(1), mask), "padded on the right"
        for row, labels, length in zip(ids, batch.labels, mask.sum(1).tolist(), strict=True):
            assert labels.shape == row.shape
            assert bool((labels[length - 1 :] == IGNORED).all())
            assert bool(((labels == IGNORED)[:-1] | (labels[:-1] == row[1:])).all())
            runs = groupby(labels.tolist(), key=IGNORED.__ne__)
            told.append([tokenizer.decode(list(run)) for counts, run in runs if counts])
    return told


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "marked"])
def test_labels_are_the_answers_and_their_ends(model: Path, tmp_path: Path, template: str) -> None:
    found = source(model, tmp_path, ROWS, template)
    CHAT.preflight(found)
    assert labelled(found) == ANSWERS
    validation = CHAT.load(found)[0].validation
    assert isinstance(validation, OfText)
    assert validation.text_bytes == len("units on one worker\n")


def test_bytes_are_those_of_the_answers_even_if_tokens_are_parts_of_characters(model: Path, tmp_path: Path) -> None:
    validation = CHAT.load(source(model, tmp_path, [ROWS[1], ROWS[0]]))[0].validation
    assert isinstance(validation, OfText)
    assert validation.text_bytes == len("what joins two\n\nneighbours, for 5 \u20ac\n".encode())


def test_long_examples_are_cut_and_counted(model: Path, tmp_path: Path) -> None:
    rows = [said("hi", "a" * 10), said("hi", "b" * 90), said("c" * 90, "hi"), said("hi", "d")]
    data, _ = CHAT.load(source(model, tmp_path, rows, tokens=80))
    assert (len(data.train), len(data.validation)) == (2, 1)
    assert data.notices[0] == "1 of 4 examples were cut to 80 tokens"
    assert data.notices[1] == "1 of 4 examples have no answer within 80 tokens and were left out"
    assert "3 examples of 80 tokens" in data.notices[2]
    assert "padding" in data.notices[2]
    labels = data.train.batch(torch.tensor([0])).labels
    assert int(labels[0, -2]) != IGNORED  # an answer up to the very end
    assert CHAT.load(source(model, tmp_path, rows[::3]))[0].train.batch(torch.tensor([0])).labels.shape[1] < 80


def test_a_twentieth_validates(model: Path, tmp_path: Path) -> None:
    data, _ = CHAT.load(source(model, tmp_path, [said("hi", str(number)) for number in range(41)]))
    assert (len(data.train), len(data.validation)) == (38, 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": \n', "line 2 is not JSON"),
        ([1], 'line 2: an example is {"messages"'),
        ({"prompt": "a"}, "line 2: an example is"),
        ({"prompt": "a", "completion": 3}, "line 2: completion is a text; got 3"),
        ({"prompt": "a", "completion": " "}, "line 2: its completion is empty"),
        ({"messages": []}, "line 2: messages is a list"),
        ({"messages": [{"content": "a"}]}, "line 2: message 1 should be an object with a role"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "line 2: the content of message 1 is a text"),
        (said("a", ""), "line 2: message 2, an answer, is empty"),
        (said("a"), "line 2: it has no answer"),
    ],
)
def test_invalid_examples_are_rejected_before_workers_start(
    model: Path, tmp_path: Path, row: Any, message: str
) -> None:
    found = source(model, tmp_path, [ROWS[0], row, ROWS[1]])
    for refuse in (CHAT.preflight, CHAT.load):
        with pytest.raises(ValueError, match="data.jsonl, " + message) as error:
            refuse(found)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("template", "rows", "message"),
    [
        (None, ROWS[:2], "line 1 has messages, and the tokenizer has no chat template .* chat_template FILE.jinja"),
        ("{% if", ROWS[:2], "line 1: the chat template does not take these messages"),
        ("{{ raise_exception('no') }}", ROWS[:2], "line 1: the chat template does not take these messages: no"),
        (FORGETFUL, ROWS[1:3], "line 1: where message 2, an answer, begins and ends cannot be found"),
    ],
)
def test_templates_that_do_not_fit_are_one_line(
    model: Path, tmp_path: Path, template: str | None, rows: list[Any], message: str
) -> None:
    found = source(model, tmp_path, rows, template)
    for refuse in (CHAT.preflight, CHAT.load):
        with pytest.raises(ValueError, match=message) as error:
            refuse(found)
        assert len(str(error.value).splitlines()) == 1


def test_no_template_is_needed_for_completions_nor_marks_for_one_answer(model: Path, tmp_path: Path) -> None:
    completions = [{"prompt": "a", "completion": " b"}] * 2
    assert labelled(source(model, tmp_path, completions, None)) == [[" b</s>"]] * 2
    assert labelled(source(model, tmp_path, ROWS[:1] * 2, FORGETFUL)) == [["thought\nunits on one worker</s>\n"]] * 2


def test_a_tokenizer_is_needed_and_its_template_is_exported(model: Path, tmp_path: Path) -> None:
    found = source(model, tmp_path, ROWS)
    assert CHAT.companions(found)["chat_template.jinja"].decode() == PLAIN
    bare = replace(found, model=None, config="gpt2")
    with pytest.raises(ValueError, match="name one with tokenizer"):
        CHAT.preflight(bare)
    CHAT.preflight(replace(bare, tokenizer=str(model)))
    for data, message in ((None, "FILE.jsonl"), (tmp_path / "no.jsonl", "not there"), (tmp_path, "another kind")):
        with pytest.raises(ValueError, match=message):
            CHAT.preflight(replace(found, data=data))


def test_packed_conversations_have_the_tokens_and_labels_of_padded_ones(model: Path, tmp_path: Path) -> None:
    rows = [said("hi " * (1 + number % 3), "abc "[: 1 + number % 4] + "d") for number in range(40)]
    padded, _ = CHAT.load(source(model, tmp_path, rows))
    packed, shape = CHAT.load(source(model, tmp_path, [*rows, said("hi", "d" * 90)], packing=True))
    assert shape.packed
    assert "packed" not in "".join(packed.notices)
    assert len(packed.train) < len(padded.train) / 2
    assert packed.notices[0].startswith("41 examples in ")
    batch = packed.train.batch(torch.arange(len(packed.train)))
    ids, positions = batch.inputs
    assert ids.shape == positions.shape == batch.labels.shape
    assert bool((positions[:, 0] == 0).all())
    steps = positions.diff(dim=1)
    assert bool(((steps == 1) | (positions[:, 1:] == 0)).all())
    assert bool((batch.labels[:, :-1][positions[:, 1:] == 0] == IGNORED).all()), "no label is of the next conversation"
    counts = [int((each != IGNORED).sum()) for each in (batch.labels, padded.train.batch(torch.arange(38)).labels)]
    assert counts[0] == counts[1] > 80
    assert isinstance(packed.train, OfText)
    assert CHAT.defaults.packing


def test_a_model_that_cannot_pack_is_padded_with_a_notice(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PretrainedModel, "can_pack", lambda self: False)
    data, shape = CHAT.load(source(model, tmp_path, [said("hi", "a"), said("hi", "b")], packing=True))
    assert not shape.packed
    assert len(data.train) == 1
    assert data.notices[-1].startswith("texts are not packed: that needs a model")
