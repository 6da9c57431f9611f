"""A model of transformers as its users have it: a folder with a description, weights, perhaps a tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.measure.readable import errors_named, read_json
from thinpipe.models.compare import compare
from thinpipe.models.decoding import check_generates
from thinpipe.models.tiny import shrunken
from thinpipe.models.verify import types_of
from thinpipe.models.weights import hollow, load_weights, random_weights, weight_files
from thinpipe.options import OptionError

# Kind, as in ``verify.KINDS`` -> class of transformers that builds it, and what it is called.
_BUILDERS = {
    "causal": ("AutoModelForCausalLM", "causal language models"),
    "sequence": ("AutoModelForSequenceClassification", "classifiers of text"),
    "image": ("AutoModelForImageClassification", "classifiers of images"),
}
_DESCRIPTION = "the description of a model"


@dataclass(frozen=True)
class PretrainedModel:
    """A folder that ``save_pretrained`` wrote, with a model of one kind; ValueError for what is none."""

    folder: Path
    kind: str

    def config(self) -> Any:
        from transformers import AutoConfig

        folder, file = self.folder, self.folder / "config.json"
        if not file.is_file():
            raise OptionError(f"{{model}} is a folder that save_pretrained wrote, and {folder} has no {file.name}")
        facts = read_json(file, _DESCRIPTION)
        if not isinstance(facts, dict):
            raise ValueError(f"{file} cannot be read as {_DESCRIPTION}: it is no object")
        if "auto_map" in facts:
            raise ValueError(
                f"the code of the model in {folder} comes with it, and thinpipe runs none from a model's folder"
            )
        if facts.get("model_type") not in types_of(self.kind):
            raise ValueError(
                f"{_BUILDERS[self.kind][1]} of transformers are trained here; {file} describes a "
                f"{facts.get('model_type')!r}"
            )
        with errors_named(file, _DESCRIPTION, "bring the model's own"), quiet():
            return AutoConfig.from_pretrained(str(folder), local_files_only=True)

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        remedy = "save the model's own there: tokenizer.save_pretrained(...)"
        with errors_named(self.folder, "a tokenizer", remedy), quiet():
            return AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True)

    def check_weights(self) -> None:
        weight_files(self.folder)

    def hollow(self) -> nn.Module:
        """The model without weights, of single precision."""
        with hollow(), quiet():
            return _built(self.config(), self.kind)

    def fill(self, *, pretrained: bool, seed: int) -> Callable[[nn.Module, Iterable[str]], None]:
        """What gives parameters of the hollow model, by their names, their values: the folder's, or random ones."""

        def fill(model: nn.Module, names: Iterable[str]) -> None:
            if pretrained:
                with quiet():
                    load_weights(model, self.folder, names)
            else:
                random_weights(model, names, seed)

        return fill

    def generation_config(self, model: Any) -> Any:
        """How the model's makers let it generate: which tokens end a text, what is not repeated."""
        from transformers import GenerationConfig

        file = self.folder / "generation_config.json"
        if not file.is_file():
            return copy.deepcopy(model.generation_config)
        with errors_named(file, "how a model generates", "bring the model's own"):
            return GenerationConfig.from_pretrained(str(self.folder), local_files_only=True)

    def check_generates(self) -> None:
        """ValueError unless a small copy of the model generates the same in pieces as whole: seconds, before a run."""
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(0)
            check_generates(_built(shrunken(self.config()), self.kind).eval())

    def check_cut(self) -> None:
        """ValueError unless a small copy of the model computes the same in units as whole: seconds, before any run."""
        small = shrunken(self.config())
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(0)
            model = _built(small, self.kind).eval()
            inputs = _padded_texts(int(small.get_text_config().vocab_size))
        compared = compare(model, inputs)
        if not compared.is_exact or compared.needs_weights_elsewhere is not None:
            where = compared.first_difference or compared.needs_weights_elsewhere or "its gradients"
            raise ValueError(f"{type(model).__name__} cannot be cut: in units it computes something else ({where})")


def _padded_texts(vocabulary: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, vocabulary, (2, 12))
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def _built(config: Any, kind: str) -> nn.Module:
    import transformers

    model: nn.Module = getattr(transformers, _BUILDERS[kind][0]).from_config(config, dtype=torch.float32)
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and reports: every worker would print them."""
    from transformers.utils import logging

    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()
