"""Pairs of answers to one prompt, of which one is preferred, for direct preference optimization.

Every line of a file is {"prompt": ..., "chosen": ..., "rejected": ...}: texts, which are concatenated as they are, or
lists of messages, which the tokenizer's chat template renders. Both texts of a pair are packed into one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinpipe.options import OptionError
from thinpipe.system.files import read_jsonl
from thinpipe.train.tasks.chat import Chat, Encoded, Examples, Line, data_files, example_problem, text_of
from thinpipe.train.tasks.corpus import HELD_OUT
from thinpipe.train.tasks.lm import Splits
from thinpipe.train.tasks.task import Batch, Metric, Source

_FORM = '{"prompt": "...", "chosen": "...", "rejected": "..."}, texts or lists of messages'
_SIDES = ("chosen", "rejected")


class Preference(Chat):
    """The same models as ``chat``; answers that are preferred become likelier than those that are not."""

    name = "preference"
    summary = "your own pairs of a chosen and a rejected answer, {data} FILE.jsonl, for DPO of your own language model"
    wants = "your own pairs of answers", "FILE.jsonl of them"
    takes = tuple(name for name in Chat.takes if name != "packing")
    metric: Metric = "accuracy"
    defaults = replace(Chat.defaults, packing=False, lr=1e-6)
    has_pairs = True

    def check_data(self, source: Source, tokenizer: Any) -> None:
        for (_, path), lines in zip(data_files(source, self.name), self.read(source), strict=True):
            for side in _side_lines(lines[0]):
                text_of(path, side, tokenizer)

    def read(self, source: Source) -> list[list[Line]]:
        return [_read_pairs(path) for _, path in data_files(source, self.name)]

    def splits(
        self, source: Source, read: list[list[Line]], tokenizer: Any, tokens: int, *, takes_masks: bool, packs: bool
    ) -> Splits:
        if not packs:
            raise OptionError(
                "task preference computes both texts of a pair in one sample, and in the code of this model, or with "
                "its attention, one would depend on the other: take another model"
            )
        parts, lost = [], 0
        for (option, path), lines in zip(data_files(source, self.name), read, strict=True):
            pairs = [
                tuple(Encoded.of(text_of(path, side, tokenizer), tokenizer, tokens) for side in _side_lines(line))
                for line in lines
            ]
            parts.append([pair for pair in pairs if all(each.answers.any() for each in pair)])
            lost += len(pairs) - len(parts[-1])
            if len(parts[-1]) < 3 - len(read):
                raise OptionError(
                    f"{{{option}}} {path}: {3 - len(read)} pairs with answers within {{tokens}} {tokens} are needed; "
                    f"it has {len(parts[-1])}: bring more, or take more tokens"
                )
        if len(read) == 1:
            parts = [[pair for number, pair in enumerate(parts[0]) if number % HELD_OUT], parts[0][::HELD_OUT]]
        length = max(sum(len(each.ids) for each in pair) for part in parts for pair in part)
        fill = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        train, validation = (Examples(part, length, fill, masked=False, packed=True) for part in parts)
        notices = [f"{lost} pairs have no answer within {tokens} tokens and were left out"] if lost else []
        return Splits(Pairs(train, 0), Pairs(validation, len(train)), notices=notices, packed=True)


@dataclass(frozen=True)
class Pairs:
    """A split of pairs, each a sample of the chosen and the rejected text."""

    rows: Examples
    first: int  # number of its first pair among those of both splits
    repeats: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        """Return pairs; labels are tokens, the place where the rejected text begins, and the number of the pair."""
        made = self.rows.batch(indices)
        begins = torch.tensor([len(self.rows.samples[index][0].ids) for index in indices.tolist()])
        return Batch(
            inputs=made.inputs, labels=torch.cat([made.labels, begins[:, None], indices[:, None] + self.first], 1)
        )

    def describe(self, indices: Tensor) -> dict[str, bytes]:
        return self.rows.describe(indices)


def _read_pairs(path: Path) -> list[Line]:
    """Return all lines; raise ValueError that names the first invalid one."""
    lines = []
    for number, row in read_jsonl(path, "pairs in JSON lines"):
        if not isinstance(row, dict) or not {"prompt", *_SIDES} <= row.keys():
            raise ValueError(f"{path}, line {number}: a pair is {_FORM}")
        if len({type(row[name]) for name in ("prompt", *_SIDES)}) > 1 or not isinstance(row["prompt"], str | list):
            raise ValueError(f"{path}, line {number}: prompt, chosen and rejected are texts, or all lists of messages")
        for side, name in zip(_side_lines((number, row)), _SIDES, strict=True):
            problem = example_problem(side[1])
            if problem is not None:
                raise ValueError(f"{path}, line {number}: {name}: {problem}")
        lines.append((number, row))
    if not lines:
        raise ValueError(f"{path} has no pairs; every line is one, as in {_FORM}")
    return lines


def _side_lines(line: Line) -> Sequence[Line]:
    """Return the chosen and the rejected text of a pair as lines of conversations."""
    number, row = line
    if isinstance(row["prompt"], list):
        return [(number, {"messages": row["prompt"] + row[name]}) for name in _SIDES]
    return [(number, {"prompt": row["prompt"], "completion": row[name]}) for name in _SIDES]
