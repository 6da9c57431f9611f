"""Language models of transformers on running text: any causal model in a folder, your own files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinpipe.measure.readable import errors_named, read_json
from thinpipe.models.compare import compare
from thinpipe.models.tiny import shrunken
from thinpipe.models.weights import hollow, load_weights, random_weights, weight_files
from thinpipe.options import OptionError
from thinpipe.workloads.checkpoint import quiet
from thinpipe.workloads.corpus import Windows, held_out, read_documents, text_files
from thinpipe.workloads.options import positive, refuse_others
from thinpipe.workloads.splits import at_most
from thinpipe.workloads.task import Data, Recipe, Shape, Source, Task

TOKENS = 256
_DESCRIPTION = "the description of a model"


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
        folder, data = self._checked(source)
        config_of(folder)
        text_files(data)
        if source.pretrained:
            weight_files(folder)
        return None

    def load(self, source: Source) -> tuple[Data, Shape]:
        folder, data = self._checked(source)
        tokens = positive("tokens", source.tokens, TOKENS, least=2)
        config = config_of(folder)
        tokenizer = tokenizer_of(folder)
        vocabulary = int(config.get_text_config().vocab_size)
        if len(tokenizer) > vocabulary:
            raise ValueError(
                f"the tokenizer in {folder} knows {len(tokenizer)} tokens, and the model has embeddings for "
                f"{vocabulary}: they are not of one model"
            )
        check_cut(config)  # here, so that it is done on several machines too
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
        folder, _ = self._checked(source)
        return hollow_model(config_of(folder))

    def fill(self, source: Source, seed: int) -> Any:
        folder, _ = self._checked(source)

        def fill(model: nn.Module, names: Iterable[str]) -> None:
            if source.pretrained:
                with quiet():
                    load_weights(model, folder, names)
            else:
                random_weights(model, names, seed)

        return fill

    def _checked(self, source: Source) -> tuple[Path, Path]:
        refuse_others(self.name, source, ("model", "data", "tokens", "samples"))
        if source.model is None or source.data is None:
            raise OptionError(
                "task lm trains your own model on your own texts: name a folder of transformers with {model}, and a "
                "file or a folder of texts with {data}"
            )
        return source.model, source.data


def config_of(folder: Path) -> Any:
    """The configuration of the causal language model in a folder; ValueError for what is none."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    file = folder / "config.json"
    if not file.is_file():
        raise OptionError(f"{{model}} is a folder that save_pretrained wrote, and {folder} has no {file.name}")
    facts = read_json(file, _DESCRIPTION)
    if not isinstance(facts, dict):
        raise ValueError(f"{file} cannot be read as {_DESCRIPTION}: it is no object")
    if "auto_map" in facts:
        raise ValueError(
            f"the code of the model in {folder} comes with it, and thinpipe runs none from a model's folder"
        )
    kind = facts.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"task lm trains causal language models of transformers; {file} describes a {kind!r}")
    with errors_named(file, _DESCRIPTION, "bring the model's own"), quiet():
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    with errors_named(folder, "a tokenizer", "save the model's own there: tokenizer.save_pretrained(...)"), quiet():
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def hollow_model(config: Any) -> nn.Module:
    """A causal language model without weights, of single precision."""
    from transformers import AutoModelForCausalLM

    with hollow(), quiet():
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def check_cut(config: Any) -> None:
    """ValueError unless a small copy of the model computes the same in units as whole: seconds, before any run."""
    from transformers import AutoModelForCausalLM

    small = shrunken(config)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
        tokens = torch.randint(3, int(small.get_text_config().vocab_size), (2, 12))
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0
    compared = compare(model, {"input_ids": tokens, "attention_mask": mask})
    if not compared.is_exact or compared.needs_weights_elsewhere is not None:
        where = compared.first_difference or compared.needs_weights_elsewhere or "its gradients"
        raise ValueError(f"{type(model).__name__} cannot be cut: in units it computes something else ({where})")
