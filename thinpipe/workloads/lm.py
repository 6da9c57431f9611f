"""Language models of transformers on running text: any causal model in a folder, your own files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from thinpipe.models.pretrained import PretrainedModel
from thinpipe.models.save import copied_files, saved_files
from thinpipe.options import OptionError
from thinpipe.workloads.corpus import Windows, held_out, read_documents, text_files
from thinpipe.workloads.options import positive, refuse_others
from thinpipe.workloads.splits import at_most
from thinpipe.workloads.task import Data, Recipe, Shape, Source, Task

TOKENS = 256


class LanguageModel(Task):
    """Every token but the first is predicted from those before it."""

    name = "lm"
    summary = "your own texts with your own causal language model of transformers"
    metric = "accuracy"
    modules = ("transformers",)
    recipe = Recipe(
        batch_size=16,
        chunks=4,
        epochs=1,
        optimizer="adamw",
        lr=2e-5,
        lr_schedule="cosine",
        warmup=0.05,
        weight_decay=0.01,
        clip_norm=1.0,
        client_layers=(1, 1),
    )

    def look_for(self, source: Source) -> int | None:
        model, data = self._checked(source)
        model.config()
        text_files(data)
        if source.pretrained:
            model.check_weights()
        return None

    def load(self, source: Source) -> tuple[Data, Shape]:
        model, data = self._checked(source)
        tokens = positive("tokens", source.tokens, TOKENS, least=2)
        tokenizer = model.tokenizer()
        vocabulary = int(model.config().get_text_config().vocab_size)
        if len(tokenizer) > vocabulary:
            raise ValueError(
                f"the tokenizer in {model.folder} knows {len(tokenizer)} tokens, and the model has embeddings for "
                f"{vocabulary}: they are not of one model"
            )
        model.check_cut()  # here, so that it is done on several machines too
        train, validation = held_out(read_documents(text_files(data)))

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        windows = [Windows.of(part, encode, tokenizer.eos_token_id, tokens) for part in (train, validation)]
        for name, part in zip(("training", "validation"), windows, strict=True):
            if not len(part):
                raise OptionError(
                    f"{{data}} {data} is too short: its {name} part has {len(part.stream)} tokens, fewer than the "
                    f"{tokens + 1} of one sample; bring more text, or take fewer {{tokens}}"
                )
        data_of = Data(train=at_most(windows[0], source.samples), validation=windows[1], classes=vocabulary)
        return data_of, Shape(classes=vocabulary, tokens=tokens, vocabulary=vocabulary)

    def build(self, shape: Shape, source: Source) -> nn.Module:
        """Without weights."""
        model, _ = self._checked(source)
        return model.hollow()

    def fill(self, source: Source, seed: int) -> Any:
        model, _ = self._checked(source)
        return model.fill(pretrained=source.pretrained, seed=seed)

    def companions(self, source: Source) -> Mapping[str, bytes]:
        model, _ = self._checked(source)
        return saved_files(model.tokenizer().save_pretrained) | copied_files(model.folder, ["generation_config.json"])

    def _checked(self, source: Source) -> tuple[PretrainedModel, Path]:
        refuse_others(self.name, source, ("model", "data", "tokens", "samples"))
        if source.model is None or source.data is None:
            raise OptionError(
                "task lm trains your own model on your own texts: name a folder of transformers with {model}, and a "
                "file or a folder of texts with {data}"
            )
        return PretrainedModel(source.model, "causal"), source.data
