"""Prompts as tokens, from the command line, a file or a pipe; only the client reads them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinpipe.options import OptionError
from thinpipe.system.files import errors_named, read_jsonl, read_text
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.models.pretrained import PretrainedModel, check_vocabulary

_FIELD = "prompt"  # in a line of JSON


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    text: str
    tokens: list[int]


def read_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts of the command line, of a file, or of standard input."""
    if given and file is not None:
        raise OptionError(f"prompts are given, or read with {{prompts}} {file}; leave one of them out")
    if given:
        return list(given)
    if file is not None:
        found = _of_file(file)
        if not found:
            raise OptionError(f"{{prompts}} {file} has no prompt: write one on each line")
        return found
    if sys.stdin is None or sys.stdin.isatty():
        raise OptionError('no prompt is given: give prompts, as in "Once upon a time", or a file with {prompts}')
    piped = sys.stdin.read()
    if not piped.strip():
        raise OptionError("the prompt that was piped in is empty; give one, or a file of them with {prompts}")
    return [piped.removesuffix("\n")]


def _of_file(file: Path) -> list[str]:
    if file.suffix != ".jsonl":
        return [line for line in read_text(file, "prompts, one on each line").split("\n") if line.strip()]
    found = []
    for number, line in read_jsonl(file, f"prompts, JSON lines with a field {_FIELD!r}"):
        text = line.get(_FIELD) if isinstance(line, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{file}, line {number} should be an object with a text {_FIELD!r}; correct the line")
        found.append(text)
    return found


def encode(texts: Sequence[str], settings: GenerationSettings) -> list[Prompt]:
    """Return the texts as tokens; raise ValueError for one that cannot be continued."""
    model = settings.pretrained
    config = model.config().get_text_config()
    tokenizer = model.tokenizer()
    if settings.chat and not getattr(tokenizer, "chat_template", None):
        raise OptionError(
            f"{{chat}} puts prompts into the tokenizer's chat template, and that of {model.name} has none: leave it out"
        )
    check_vocabulary(len(tokenizer), int(config.vocab_size), str(model.tokenizer_folder or model.name))
    positions = positions_of(model)
    prompts = []
    for number, text in enumerate(texts, 1):
        with errors_named(f"prompt {number}", "a text", "write another"):
            tokens = _tokens(tokenizer, text, settings.chat)
        if not tokens:
            raise ValueError(f"prompt {number} is empty: a text goes on from one token at the least")
        if positions is not None and len(tokens) + settings.max_new_tokens > positions:
            raise OptionError(
                f"the model has {positions} positions, and prompt {number} has {len(tokens)} tokens with "
                f"{settings.max_new_tokens} to come: shorten it, or take fewer {{max_new_tokens}}"
            )
        prompts.append(Prompt(text, tokens))
    return prompts


def positions_of(model: PretrainedModel) -> int | None:
    """Return the maximum number of positions of a model; None if its config has none."""
    positions = getattr(model.config().get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def _tokens(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if chat:
        messages = [{"role": "user", "content": text}]
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(shown, add_special_tokens=False)["input_ids"])  # the template adds them
    return list(tokenizer(text)["input_ids"])


def padded(prompts: Sequence[Prompt], padding: int) -> dict[str, Tensor]:
    """Return a batch padded on the left, so that each row ends with the last token of its prompt."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    rows = [[padding] * (longest - len(prompt.tokens)) + prompt.tokens for prompt in prompts]
    mask = [[0] * (longest - len(prompt.tokens)) + [1] * len(prompt.tokens) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
