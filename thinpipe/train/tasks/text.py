"""Text classification: the common part of such tasks; rte and cola of GLUE, with defaults for pretrained weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.train.models.function import FunctionModel
from thinpipe.train.models.pretrained import PretrainedModel
from thinpipe.train.models.save import saved_files
from thinpipe.train.tasks.classifier import (
    ClassifierTask,
    check_length,
    check_positions,
    fitted,
    ordered_names,
    padded_tokenizer,
)
from thinpipe.train.tasks.hub import PublicData, class_names, class_numbers, public_splits
from thinpipe.train.tasks.roberta import BASE, ENDS, ROBERTA_MODULES, Size, WordTokenizer, new_roberta, roberta_bytes
from thinpipe.train.tasks.sources import check_tokens, positive
from thinpipe.train.tasks.splits import Texts, at_most
from thinpipe.train.tasks.task import Data, Metric, Shape, Source, TaskDefaults

TOKENS = 128
LEAST_TOKENS = 8  # a pair of texts has four special tokens
VOCABULARY = 16384  # maximum number of words of a tokenizer made from the data
CHECKPOINT = "FacebookAI/roberta-base"
DEFAULTS = TaskDefaults(
    batch_size=32,
    chunks=4,
    epochs=20,
    optimizer="adamw",
    lr=2e-5,
    lr_schedule="linear",
    warmup=0.06,  # as for RoBERTa's own fine-tuning, as is the decay below
    weight_decay=0.1,
    client_layers=(2, 2),
)

Rows = Sequence[tuple[str, ...]]  # one or two texts each
Encoded = Sequence[tuple[Tensor, ...]]  # per set of rows: token ids, mask, perhaps types


class TextTask(ClassifierTask):
    """The common part of text classification: options, tokens, RoBERTa unless another model is named."""

    kind = "sequence"
    own_type = "roberta"
    sizes = ("tokens", "tokenizer")
    defaults = DEFAULTS
    modules = ROBERTA_MODULES
    checkpoint: str | None = CHECKPOINT
    size: Size = BASE  # of a model from scratch

    def own_units(self, source: Source) -> int:
        weights = self.own_checkpoint(source)
        return ENDS + (self.size.layers if weights is None else weights.number("num_hidden_layers"))

    def own_bytes(self, width: float) -> int:
        return roberta_bytes(self.size, width)

    def own_model(self, shape: Shape, source: Source) -> nn.Module:
        weights = self.own_checkpoint(source)
        if weights is None:
            return new_roberta(shape, self.size, source.width)
        return replace(weights, classes=shape.classes).with_weights()

    def check_size(self, model: PretrainedModel, source: Source) -> None:
        check_positions(model, self._tokens(source))

    def _tokens(self, source: Source) -> int:
        return positive("tokens", source.tokens, TOKENS, least=LEAST_TOKENS)

    def companions(self, source: Source) -> Mapping[str, bytes]:
        """Return the files of the model's or the checkpoint's tokenizer; none for the word-level one."""
        model = self.model(source)
        if model is not None:
            return saved_files(padded_tokenizer(model).save_pretrained)
        weights = self.own_checkpoint(source)
        return {} if weights is None else saved_files(weights.tokenizer().save_pretrained)

    def tokenized(
        self,
        source: Source,
        train: tuple[Rows, Tensor],
        validation: tuple[Rows, Tensor],
        names: Iterable[str] = (),  # of the classes
    ) -> tuple[Data, Shape]:
        """Return data as tokens of the model's or the checkpoint's tokenizer, or of one made of the training words."""
        tokens = self._tokens(source)
        check_tokens(tokens, len(train[0]) + len(validation[0]))
        classes = int(torch.cat([train[1], validation[1]]).max()) + 1
        encoded, shape = self._encoded(source, (train[0], validation[0]), Shape(classes=classes, tokens=tokens))
        splits = [
            Texts(ids=ids, mask=mask, types=types[0] if types else None, labels=labels)
            for (ids, mask, *types), (_, labels) in zip(encoded, (train, validation), strict=True)
        ]
        data = Data(train=at_most(splits[0], source.samples), validation=splits[1], classes=classes)
        return data, replace(shape, labels=ordered_names(names, classes))

    def _encoded(self, source: Source, parts: tuple[Rows, Rows], shape: Shape) -> tuple[Encoded, Shape]:
        """Return the rows of both parts as tokens, and the shape with the tokenizer's properties."""
        model, tokens = self.model(source), shape.tokens
        assert tokens is not None
        if model is not None:
            tokenizer = padded_tokenizer(model)
            encoded = _with_types(tokenizer, parts, tokens)
            if isinstance(model, FunctionModel):
                model.check_classes(tuple(each[:2] for each in encoded[0]), shape.classes, self.kind)
                return encoded, replace(shape, vocabulary=len(tokenizer))
            check_positions(model, tokens)
            model, shape = fitted(model, tokenizer, shape)
            model.check_cut()  # here, so that it is checked on several machines too
            return encoded, shape
        weights = self.own_checkpoint(source)
        if weights is None:
            by_word = WordTokenizer.of_texts((text for row in parts[0] for text in row), VOCABULARY)
            return [by_word.encode(rows, tokens) for rows in parts], replace(shape, vocabulary=by_word.vocabulary)
        tokenizer = weights.tokenizer()
        check_length(tokens, weights.number("max_position_embeddings") - weights.number("pad_token_id") - 1)
        encoded = [_encode(tokenizer, rows, tokens)[:2] for rows in parts]
        return encoded, replace(shape, vocabulary=weights.number("vocab_size"))


@dataclass(frozen=True, kw_only=True)
class Glue(TextTask):
    """A data set of GLUE: one or two texts, and a label."""

    name: str
    summary: str
    metric: Metric
    texts: tuple[str, ...]

    def preflight(self, source: Source) -> int | None:
        units = super().preflight(source)
        self._splits(source)
        return units

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Load the data from ``source.data``, the hub's cache or the hub."""
        self.check_options(source)
        where = source.data or f"nyu-mll/glue {self.name}"
        splits = self._splits(source)
        train, validation = (self._rows(where, rows) for rows in splits)
        return self.tokenized(source, train, validation, class_names(splits[0], "label"))

    def _splits(self, source: Source) -> list[Any]:
        """Return the rows of both parts, which stay on disk."""
        public = PublicData(repository="nyu-mll/glue", part=self.name)
        return public_splits(self.name, public, source.data, ("train", "validation"), (*self.texts, "label"))

    def _rows(self, where: Path | str, rows: Any) -> tuple[Rows, Tensor]:
        texts = list(zip(*(rows[name][:] for name in self.texts), strict=True))
        for number, each in enumerate(texts):
            if not all(isinstance(text, str) for text in each):
                raise ValueError(f"{where}: {' and '.join(self.texts)} are texts; row {number} has {each!r}")
        return texts, class_numbers(where, "label", rows["label"][:])


def _encode(tokenizer: Any, rows: Rows, tokens: int) -> tuple[Tensor, ...]:
    """Return token ids, mask, and the text of a row that each token belongs to, if the tokenizer returns that."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    encoded = tokenizer(*columns, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt")
    names = ("input_ids", "attention_mask", "token_type_ids")
    return tuple(encoded[name] for name in names if name in encoded)


def _with_types(tokenizer: Any, parts: Sequence[Rows], tokens: int) -> Encoded:
    """Encode several sets of rows, with types if any differs from zero, which models assume by default."""
    encoded = [_encode(tokenizer, rows, tokens) for rows in parts]
    plain = not any(types.any() for _, _, *each in encoded for types in each)
    return [each[:2] for each in encoded] if plain else encoded


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
