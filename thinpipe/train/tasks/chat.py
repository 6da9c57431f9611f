"""Conversations for language models: prompts and answers, with labels on the answers only.

Every line of a file is an example: ``messages``, which the tokenizer's chat template renders as a text, or ``prompt``
and ``completion``, which are concatenated as they are. An answer is a character range of that text; its tokens, and the
end token after it, are the labels. Examples are padded on the right to one length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinpipe.options import OptionError
from thinpipe.system.files import read_jsonl, read_text
from thinpipe.system.sanitize import first_line
from thinpipe.system.sizes import check_fits
from thinpipe.train.models.packed import first_fit, positions
from thinpipe.train.tasks.corpus import HELD_OUT
from thinpipe.train.tasks.lm import LanguageModel, Model, Splits
from thinpipe.train.tasks.sources import MODEL_OPTIONS, data_file
from thinpipe.train.tasks.task import IGNORED, Batch, Source

_MARKED = re.compile(r"\{%-?\s*generation\b")  # a template that marks answers itself
_MEMORY = 4  # times the file size: its text, the parsed JSON, and tokens, about four bytes each
_FORMS = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} or ' + (
    '{"prompt": "...", "completion": "..."}'
)
Line = tuple[int, dict[str, Any]]  # line number in the file, counted from 1, and its object


class Chat(LanguageModel):
    """The same models as ``lm``; an answer's tokens are predicted from everything before them."""

    name = "chat"
    summary = "your own conversations, {data} FILE.jsonl, with your own causal language model"
    wants = "your own conversations", "FILE.jsonl of them"
    takes: tuple[str, ...] = (*MODEL_OPTIONS, "chat_template", "data", "validation", "tokens", "packing", "samples")
    usual_tokens = 1024
    defaults = replace(LanguageModel.defaults, packing=True)

    def check_data(self, source: Source, tokenizer: Any) -> None:
        for (option, path), lines in zip(data_files(source, self.name), self.read(source), strict=True):
            size = _MEMORY * path.stat().st_size
            check_fits(f"{{{option}}} {path}: its text and tokens", size, "bring less, or a part of it")
            # The first of each kind: an error of the template affects all.
            for kind in ("messages", "prompt"):
                first = next((line for line in lines if kind in line[1]), None)
                if first is not None:
                    text_of(path, first, tokenizer)

    def tokenizer(self, model: Model, source: Source) -> Any:
        if model.trains_tokenizer:
            raise OptionError(f"task chat trains no tokenizer, and {model.name} has none: name one with {{tokenizer}}")
        found = model.tokenizer()
        if not found.is_fast:
            raise ValueError(
                "answers are found by the places of tokens in a text, which the tokenizer of "
                f"{model.name} does not return: bring a fast one (tokenizer.json)"
            )
        if source.chat_template is not None:
            found.chat_template = read_text(source.chat_template, "a chat template")
        return found

    def read(self, source: Source) -> list[list[Line]]:
        """Return the lines of the data, and those of the validation file if one was given."""
        return [_read(path) for _, path in data_files(source, self.name)]

    def splits(
        self, source: Source, read: list[list[Line]], tokenizer: Any, tokens: int, *, takes_masks: bool, packs: bool
    ) -> Splits:
        found, kept = [], []
        for (option, path), lines in zip(data_files(source, self.name), read, strict=True):
            encoded = [Encoded.of(text_of(path, line, tokenizer), tokenizer, tokens) for line in lines]
            answered = [each for each in encoded if each.answers.any()]
            if len(answered) < (2 if len(read) == 1 else 1):
                needed = "one example trains and another validates, at the least" if len(read) == 1 else "one is needed"
                raise OptionError(
                    f"{{{option}}} {path}: {needed}; it has {len(lines)}, {len(answered)} with an answer within "
                    f"{{tokens}} {tokens}: bring more, or take more tokens"
                )
            found.append(encoded)
            kept.append(answered)
        if len(read) == 1:
            train = [each for number, each in enumerate(kept[0]) if number % HELD_OUT]
            kept = [train, kept[0][::HELD_OUT]]
        length = max(len(each.ids) for part in kept for each in part)
        fill = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id  # is masked, any will do
        form = Examples.packed_of if packs else Examples.padded_of
        made = [form(part, length, fill, takes_masks) for part in kept]
        notices = _notices(list(chain(*found)), list(chain(*kept)), tokens, made)
        return Splits(made[0], made[1], notices=notices, packed=packs)


@dataclass(frozen=True)
class Text:
    """An example as a text."""

    text: str
    answers: Sequence[tuple[int, int]]  # character ranges
    has_special: bool  # True: it has all special tokens; otherwise the tokenizer adds them


@dataclass(frozen=True)
class Encoded:
    """An example as tokens."""

    ids: Tensor  # int32
    answers: Tensor  # True for tokens that are labels
    text_bytes: int  # of the text of those labels
    is_cut: bool

    @staticmethod
    def of(example: Text, tokenizer: Any, tokens: int) -> Encoded:
        """Return an example as at most ``tokens`` tokens."""
        made = tokenizer(
            example.text, add_special_tokens=not example.has_special, return_offsets_mapping=True, verbose=False
        )
        ids, places = list(made["input_ids"]), list(made["offset_mapping"])
        # A token belongs to an answer if some of its characters do: a token is predicted as a unit.
        answers = [any(first < end and last > start for start, end in example.answers) for first, last in places]
        eos = tokenizer.eos_token_id
        if not example.has_special and eos is not None:
            if ids[-1:] != [eos] or places[-1][0] < places[-1][1]:  # the tokenizer adds none
                ids, places, answers = [*ids, eos], [*places, (0, 0)], [*answers, True]
            answers[-1] = True
        answers[:1] = [False]  # there is nothing before it to predict it from
        ids, answers, is_cut = ids[:tokens], answers[:tokens], len(ids) > tokens
        special = set(tokenizer.all_special_ids)
        labelled = [places[i] for i, token in enumerate(ids) if answers[i] and token not in special]
        size = len("".join(example.text[first:last] for first, last in _apart(labelled)).encode())
        return Encoded(torch.tensor(ids, dtype=torch.int32), torch.tensor(answers), size, is_cut)


def _apart(places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges without overlap with earlier ones: several tokens may be parts of one character."""
    behind = 0
    for first, last in places:
        yield max(first, behind), last
        behind = max(behind, last)


@dataclass(frozen=True)
class Examples:
    """A split of conversations, each a sample padded to one length, or several packed into one."""

    samples: Sequence[Sequence[Encoded]]
    length: int  # of every sample
    fill: int  # the padding token
    masked: bool  # True: the model takes an attention mask
    packed: bool = False  # True: it takes positions instead, which restart with each conversation
    repeats: ClassVar[bool] = True

    @staticmethod
    def padded_of(examples: Sequence[Encoded], length: int, fill: int, masked: bool) -> Examples:
        return Examples([[each] for each in examples], length, fill, masked)

    @staticmethod
    def packed_of(examples: Sequence[Encoded], length: int, fill: int, masked: bool) -> Examples:
        rows = first_fit([len(each.ids) for each in examples], length)
        return Examples([[examples[number] for number in row] for row in rows], length, fill, masked, packed=True)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def text_bytes(self) -> int:
        """The number of bytes of all answers, in UTF-8."""
        return sum(each.text_bytes for each in chain(*self.samples))

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        chosen = [self.samples[index] for index in indices.tolist()]
        ids = self._padded([torch.cat([each.ids.long() for each in row]) for row in chosen], self.fill)
        labels = self._padded([torch.cat([_labels(each) for each in row]) for row in chosen], IGNORED)
        lengths = [[len(each.ids) for each in row] for row in chosen]
        if self.packed:
            return Batch(inputs=(ids, torch.stack([positions(row, self.length) for row in lengths])), labels=labels)
        mask = self._padded([torch.ones(sum(row), dtype=torch.int64) for row in lengths], 0)
        return Batch(inputs=(ids, mask) if self.masked else (ids,), labels=labels)

    def describe(self, indices: Tensor) -> dict[str, bytes]:
        """Return all tokens, and which of them are answers."""
        chosen = [each for index in indices.tolist() for each in self.samples[index]]
        return {
            "labels": b"".join(each.answers.numpy().tobytes() for each in chosen),
            "texts": b"".join(each.ids.numpy().tobytes() for each in chosen),
        }

    def _padded(self, rows: Sequence[Tensor], value: int) -> Tensor:
        padded = pad_sequence([rows[0].new_empty(self.length), *rows], batch_first=True, padding_value=value)
        return padded[1:].contiguous()


def _labels(example: Encoded) -> Tensor:
    """Return the label of each position: the following token if that is of an answer."""
    following = example.ids[1:].long().masked_fill(~example.answers[1:], IGNORED)
    return torch.cat([following, following.new_full((1,), IGNORED)])


def _notices(found: Sequence[Encoded], kept: Sequence[Encoded], tokens: int, made: Sequence[Examples]) -> list[str]:
    lines = []
    cut, lost = sum(each.is_cut for each in kept), len(found) - len(kept)
    if cut:
        lines.append(f"{cut} of {len(found)} examples were cut to {tokens} tokens")
    if lost:
        lines.append(f"{lost} of {len(found)} examples have no answer within {tokens} tokens and were left out")
    length, samples = made[0].length, sum(map(len, made))
    where = f"in {samples} samples of {length} tokens" if made[0].packed else f"of {length} tokens"
    room = samples * length
    filled = sum(len(each.ids) for each in kept) / room
    learnt = sum(int(each.answers.sum()) for each in kept) / room
    lines.append(f"{len(kept)} examples {where}: {learnt:.0%} of them are answers, {1 - filled:.0%} are padding")
    return lines


# Lines to texts


def data_files(source: Source, task: str) -> list[tuple[str, Path]]:
    """Return the files that a source names, with the option of each; raise OptionError if one is not there."""
    given = [("data", source.data), ("validation", source.validation)]
    return [(name, data_file(path, task, name, ".jsonl")) for name, path in given if path is not None or name == "data"]


def _read(path: Path) -> list[Line]:
    """Return all examples; raise ValueError that names the first invalid line."""
    lines = []
    for number, row in read_jsonl(path, "conversations in JSON lines"):
        problem = example_problem(row)
        if problem is not None:
            raise ValueError(f"{path}, line {number}: {problem}")
        lines.append((number, row))
    if not lines:
        raise ValueError(f"{path} has no examples; every line is one, as in {_FORMS}")
    return lines


def example_problem(row: Any) -> str | None:
    """Return what is wrong with an example; None if nothing is."""
    if not isinstance(row, dict) or ("messages" not in row and not {"prompt", "completion"} <= row.keys()):
        return f"an example is {_FORMS}"
    if "messages" not in row:
        for name in ("prompt", "completion"):
            if not isinstance(row[name], str):
                return f"{name} is a text; got {_shown(row[name])}"
        return None if row["completion"].strip() else "its completion is empty: fill it in, or remove the line"
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        return f"messages is a list of objects with role and content; got {_shown(messages)}"
    for place, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {place} should be an object with a role and a content; got {_shown(message)}"
        calls = message.get("tool_calls")
        if not isinstance(message.get("content"), str) and not calls:
            return f"the content of message {place} is a text; got {_shown(message.get('content'))}"
        if message["role"] == "assistant" and not calls and not message["content"].strip():
            return f"message {place}, an answer, is empty: fill it in, or remove the line"
    if not any(message["role"] == "assistant" for message in messages):
        return "it has no answer, a message of the role assistant: add one, or remove the line"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def text_of(path: Path, line: Line, tokenizer: Any) -> Text:
    """Return an example as a text; raise ValueError that names the line if that fails."""
    number, row = line
    where = f"{path}, line {number}"
    if "messages" not in row:
        start, end = len(row["prompt"]), len(row["prompt"]) + len(row["completion"])
        found = Text(row["prompt"] + row["completion"], [(start, end)], has_special=False)
    elif not tokenizer.chat_template:
        raise OptionError(
            f"{where} has messages, and the tokenizer has no chat template to make a text of them: give "
            "one with {chat_template} FILE.jinja, or lines with prompt and completion"
        )
    else:
        # The part after the last answer has no labels.
        last = max(place for place, message in enumerate(row["messages"]) if message["role"] == "assistant")
        try:
            found = _rendered(row["messages"][: last + 1], row.get("tools"), tokenizer)
        except OptionError as error:
            raise OptionError(f"{where}: {error.args[0]}") from None
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{where}: the chat template does not take these messages: {first_line(error)}") from None
    try:
        found.text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} has half a character (a lone surrogate): correct it") from None
    return found


def _rendered(messages: Sequence[Mapping[str, Any]], tools: Any, tokenizer: Any) -> Text:
    """Return the conversation as rendered by the template, with the character ranges of its answers.

    Some templates mark answers. Otherwise an answer is the difference between the conversation up to its end and the
    conversation before it, rendered with the generation prompt.
    """

    def text(count: int, *, prompt: bool = False) -> str:
        render = tokenizer.apply_chat_template
        return str(render(list(messages[:count]), tools=tools, tokenize=False, add_generation_prompt=prompt))

    complete = text(len(messages))
    if _MARKED.search(tokenizer.get_chat_template(tools=tools)):
        return Text(complete, _marked(messages, tools, tokenizer), has_special=True)
    answers = []
    for place in (place for place, message in enumerate(messages) if message["role"] == "assistant"):
        before, after = text(place, prompt=True) if place else "", text(place + 1)
        if not (after.startswith(before) and complete.startswith(after) and len(after) > len(before)):
            raise OptionError(
                f"where message {place + 1}, an answer, begins and ends cannot be found, since the chat template "
                "writes what is before it otherwise once it is there: give a template with {% generation %} marks "
                "({chat_template}), or lines with one answer each"
            )
        answers.append((len(before), len(after)))
    return Text(complete, answers, has_special=True)


def _marked(messages: Sequence[Mapping[str, Any]], tools: Any, tokenizer: Any) -> list[tuple[int, int]]:
    made = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    pairs = zip(made["offset_mapping"], made["assistant_masks"], strict=True)
    runs = ([place for place, _ in run] for marked, run in groupby(pairs, key=lambda pair: pair[1]) if marked)
    return [(run[0][0], run[-1][1]) for run in runs]
