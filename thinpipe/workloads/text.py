"""Public texts with RoBERTa-base: rte and cola of GLUE, with the recipe that pretrained weights take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.models.save import saved_files
from thinpipe.options import OptionError
from thinpipe.workloads.checkpoint import Weights
from thinpipe.workloads.hub import PublicData, class_numbers, columns_of, load_public, load_saved
from thinpipe.workloads.options import check_tokens, positive, refuse_others
from thinpipe.workloads.roberta import BASE, ENDS, ROBERTA_MODULES, Size, new_roberta, pretrained_roberta, roberta_bytes
from thinpipe.workloads.splits import Texts, at_most
from thinpipe.workloads.task import Data, Metric, Recipe, Shape, Source, Task
from thinpipe.workloads.words import WordTokenizer

TOKENS = 128
LEAST_TOKENS = 8  # a pair of texts has four tokens around it
VOCABULARY = 16384  # words at most, when the tokenizer is made from the data
CHECKPOINT = "FacebookAI/roberta-base"
RECIPE = Recipe(
    batch_size=32,
    chunks=4,
    epochs=20,
    optimizer="adamw",
    lr=2e-5,
    lr_schedule="polynomial",
    warmup=0.06,  # RoBERTa's own for fine-tuning, as is the decay below
    weight_decay=0.1,
    client_layers=(2, 2),
)

Rows = Sequence[tuple[str, ...]]  # of one or two texts each


class RobertaTask(Task):
    """What tasks with RoBERTa of any source share: options, tokens, model."""

    recipe = RECIPE
    modules = ROBERTA_MODULES
    checkpoint: str | None = CHECKPOINT
    size: Size = BASE  # of a model from scratch

    def check(self, source: Source) -> Weights | None:
        """The checkpoint to start from, or None; ValueError for options that make no sense."""
        refuse_others(self.name, source, ("data", "weights", "tokens", "width", "samples"))
        return Weights.of(source, task=self.name, kind="roberta", checkpoint=self.checkpoint)

    def look_for(self, source: Source) -> int:
        weights = self.check(source)
        return ENDS + (self.size.layers if weights is None else weights.number("num_hidden_layers"))

    def weight_bytes(self, source: Source) -> int:
        return roberta_bytes(self.size, source.width) if self.check(source) is None else 0

    def build(self, shape: Shape, source: Source) -> nn.Module:
        """With the checkpoint's weights, or random ones."""
        weights = self.check(source)
        return new_roberta(shape, self.size, source.width) if weights is None else pretrained_roberta(shape, weights)

    def companions(self, source: Source) -> Mapping[str, bytes]:
        """The checkpoint's tokenizer; one of words is none of transformers."""
        weights = self.check(source)
        return {} if weights is None else saved_files(weights.tokenizer().save_pretrained)

    def tokenized(
        self, source: Source, train: tuple[Rows, Tensor], validation: tuple[Rows, Tensor]
    ) -> tuple[Data, Shape]:
        """Texts and labels as tokens: the checkpoint's, or words of the training texts."""
        weights = self.check(source)
        tokens = positive("tokens", source.tokens, TOKENS, least=LEAST_TOKENS)
        check_tokens(tokens, len(train[0]) + len(validation[0]))
        classes = int(torch.cat([train[1], validation[1]]).max()) + 1
        if weights is None:
            words = WordTokenizer.of_texts((text for row in train[0] for text in row), VOCABULARY)
            encoded = [words.encode(rows, tokens) for rows, _ in (train, validation)]
            vocabulary = words.vocabulary
        else:
            tokenizer = weights.tokenizer()
            _fit(tokens, weights.number("max_position_embeddings") - weights.number("pad_token_id") - 1)
            encoded = [_encode(tokenizer, rows, tokens) for rows, _ in (train, validation)]
            vocabulary = weights.number("vocab_size")
        splits = [
            Texts(ids=ids, mask=mask, labels=labels)
            for (ids, mask), (_, labels) in zip(encoded, (train, validation), strict=True)
        ]
        data = Data(train=at_most(splits[0], source.samples), validation=splits[1], classes=classes)
        return data, Shape(classes=classes, tokens=tokens, vocabulary=vocabulary)


@dataclass(frozen=True, kw_only=True)
class Glue(RobertaTask):
    """A data set of GLUE: one or two texts, and a label."""

    name: str
    summary: str
    metric: Metric
    texts: tuple[str, ...]

    def look_for(self, source: Source) -> int:
        units = super().look_for(source)
        self._splits(source)
        return units

    def load(self, source: Source) -> tuple[Data, Shape]:
        """From ``source.data``, the hub's cache or the hub."""
        self.check(source)
        where = source.data or f"nyu-mll/glue {self.name}"
        train, validation = (self._rows(where, rows) for rows in self._splits(source))
        return self.tokenized(source, train, validation)

    def _splits(self, source: Source) -> list[Any]:
        """The rows of both parts, which stay on disk."""
        public = PublicData(repository="nyu-mll/glue", part=self.name)
        names = ("train", "validation")
        whole = load_saved(source.data, names, public.part) if source.data else load_public(self.name, public)
        for name in names:
            columns_of(source.data, public, whole[name], (*self.texts, "label"))
        return [whole[name] for name in names]

    def _rows(self, where: Path | str, rows: Any) -> tuple[Rows, Tensor]:
        texts = list(zip(*(rows[name][:] for name in self.texts), strict=True))
        for number, each in enumerate(texts):
            if not all(isinstance(text, str) for text in each):
                raise ValueError(f"{where}: {' and '.join(self.texts)} are texts; row {number} has {each!r}")
        return texts, class_numbers(where, "label", rows["label"][:])


def _fit(tokens: int, most: int) -> None:
    if tokens > most:
        raise OptionError(f"these weights take texts of up to {most} tokens; got {{tokens}} {tokens}")


def _encode(tokenizer: Any, rows: Rows, tokens: int) -> tuple[Tensor, Tensor]:
    columns = [list(column) for column in zip(*rows, strict=True)]
    encoded = tokenizer(*columns, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"]


RTE = Glue(
    name="rte",
    summary="GLUE's RTE, 2490 pairs of texts: does one follow from the other; RoBERTa-base from public weights",
    metric="accuracy",
    texts=("sentence1", "sentence2"),
)
COLA = Glue(
    name="cola",
    summary="GLUE's CoLA, 8551 sentences: is it acceptable English; RoBERTa-base from public weights",
    metric="matthews",
    texts=("sentence",),
)
