"""Language modeling on your own running text, with any causal transformers model or with units of your own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinpipe.options import OptionError
from thinpipe.train.models.function import is_of_transformers
from thinpipe.train.models.pretrained import PretrainedModel, check_cut, check_vocabulary, special_tokens
from thinpipe.train.models.save import copied_files, saved_files
from thinpipe.train.tasks.corpus import Windows, batches, check_texts, read_texts
from thinpipe.train.tasks.sources import MODEL_OPTIONS, Model, ModelTask, chosen_model, positive, reject_unused_options
from thinpipe.train.tasks.splits import at_most
from thinpipe.train.tasks.task import Data, Metric, Shape, Source, Split, TaskDefaults

TOKENS = 256
VOCABULARY = 8192  # of a trained tokenizer
END = "<|endoftext|>"
_NOT_PACKED = (
    "texts are not packed: that needs a model that transformers builds, whose code and attention keep them apart"
)


@dataclass(frozen=True)
class Splits:
    """Splits of a task's data."""

    train: Split
    validation: Split
    notices: Sequence[str] = ()
    packed: bool = False


class LanguageModel(ModelTask):
    """Every token but the first is predicted from those before it."""

    name = "lm"
    summary = "your own texts with your own causal language model of transformers"
    wants = "your own texts", "a file or a folder of texts"  # for error messages
    takes: tuple[str, ...] = (
        *MODEL_OPTIONS,
        "vocabulary",
        "data",
        "validation",
        "tokens",
        "packing",
        "samples",
    )  # of Source
    usual_tokens = TOKENS
    metric: Metric = "perplexity"
    modules = ("transformers",)
    defaults = TaskDefaults(
        batch_size=16,
        chunks=4,
        epochs=1,
        optimizer="adamw",
        lr=2e-5,
        lr_schedule="cosine",
        warmup=0.05,
        weight_decay=0.01,
        clip_norm=1.0,
    )

    def preflight(self, source: Source) -> int | None:
        model = self.model(source)
        if isinstance(model, PretrainedModel):
            _check_positions(model, self._tokens(source))
        model.check_weights(pretrained=source.pretrained)
        tokenizer = self.tokenizer(model, source)
        if tokenizer is not None:
            model.fitted_to(tokenizer)
        self.check_data(source, tokenizer)
        return None

    def load(self, source: Source) -> tuple[Data, Shape]:
        model = self.model(source)
        tokens = self._tokens(source)
        # Repeated here: on several machines, nothing was checked before.
        if isinstance(model, PretrainedModel):
            _check_positions(model, tokens)
        tokenizer = self.tokenizer(model, source)
        model = model if tokenizer is None else model.fitted_to(tokenizer)
        read = self.read(source)
        if tokenizer is None:
            tokenizer = train_tokenizer(read[0], source.vocabulary or VOCABULARY)
            model = model.fitted_to(tokenizer)
        vocabulary, takes_masks = self._check_model(model, len(tokenizer), tokens)
        packs = (source.packing or self.has_pairs) and isinstance(model, PretrainedModel) and model.can_pack()
        made = self.splits(source, read, tokenizer, tokens, takes_masks=takes_masks, packs=packs)
        follows = isinstance(model, PretrainedModel) and model.follows_tokenizer
        data = Data(
            train=at_most(made.train, source.samples),
            validation=made.validation,
            classes=vocabulary,
            companions=saved_files(tokenizer.save_pretrained) if follows else {},
            notices=[*made.notices, *([_NOT_PACKED] if source.packing and not packs else [])],
        )
        special = special_tokens(tokenizer) if follows else None
        return data, Shape(
            classes=vocabulary, tokens=tokens, vocabulary=vocabulary, special=special, packed=made.packed
        )

    def check_data(self, source: Source, tokenizer: Any) -> None:
        """Raise ValueError for errors of the data that can be found before workers start."""
        assert source.data is not None
        check_texts(source.data, "data")
        if source.validation is not None:
            check_texts(source.validation, "validation")

    def tokenizer(self, model: Model, source: Source) -> Any:
        """Return the model's tokenizer; None if one will be trained."""
        return None if model.trains_tokenizer else model.tokenizer()

    def read(self, source: Source) -> Any:
        """Return the input of ``splits``: here the training texts, then the validation texts."""
        assert source.data is not None
        return read_texts(source.data, source.validation)

    def splits(
        self, source: Source, read: Any, tokenizer: Any, tokens: int, *, takes_masks: bool, packs: bool
    ) -> Splits:
        """Return samples of at most ``tokens`` tokens.

        ``takes_masks``: the model takes attention masks. ``packs``: samples may have several texts.
        """
        windows = [Windows.of(part, tokenizer, tokens, packed=packs) for part in read]
        for name, part in zip(("training", "validation"), windows, strict=True):
            if not len(part):
                where = f"{{data}} {source.data} is too short: its {name} part"
                if source.validation is not None:
                    path = source.data if name == "training" else source.validation
                    where = f"{{{'data' if name == 'training' else 'validation'}}} {path} is too short: it"
                raise OptionError(
                    f"{where} has {len(part.stream)} tokens, fewer than the {tokens + 1} of one sample; bring more "
                    "text, or take fewer {tokens}"
                )
        return Splits(windows[0], windows[1], packed=packs)

    def companions(self, source: Source) -> Mapping[str, bytes]:
        model = self.model(source)
        tokenizer = self.tokenizer(model, source)
        files = {} if tokenizer is None else saved_files(tokenizer.save_pretrained)
        if isinstance(model, PretrainedModel) and model.folder is not None and not model.follows_tokenizer:
            files |= copied_files(model.folder, ["generation_config.json"])
        if isinstance(model, PretrainedModel) and model.folder is not None and model.trusted:
            files |= copied_files(model.folder, [file.name for file in model.folder.glob("*.py")])
        return files

    def model(self, source: Source, *, reads: bool = True) -> Model:
        """Return the model that the source names; raise ValueError if there is none, or for options not used here.

        ``reads``: this worker needs data.
        """
        reject_unused_options(self.name, source, self.takes)
        model = chosen_model(source, "causal")
        if model is None or (reads and source.data is None):
            raise OptionError(
                f"task {self.name} trains your own model on {self.wants[0]}: name a folder of transformers with "
                f"{{model}}, or a model type with {{config}}, and {self.wants[1]} with {{data}}"
            )
        if source.vocabulary is not None and not model.trains_tokenizer:
            raise OptionError(
                "{vocabulary} is of a tokenizer that is trained, with {config} of a folder without one, and here "
                "there is one: leave it out"
            )
        return model

    def model_without_data(self, source: Source) -> Model:
        return self.model(replace(source, tokenizer=None, vocabulary=None), reads=False)

    def _tokens(self, source: Source) -> int:
        return positive("tokens", source.tokens, self.usual_tokens, least=2)

    def _check_model(self, model: Model, known: int, tokens: int) -> tuple[int, bool]:
        """Return the model's vocabulary size, and whether it takes attention masks.

        Raises ValueError if it cannot be cut or trained on such texts.
        """
        if isinstance(model, PretrainedModel):
            model.check_cut()
            return model.vocabulary, True
        with torch.random.fork_rng(devices=[]):
            made = model.build()
        vocabulary = model.vocabulary_of(made, tokens)
        check_vocabulary(known, vocabulary, str(model.tokenizer_folder))
        if is_of_transformers(made):
            check_cut(made.config, type(made)._from_config, "causal")  # type: ignore[attr-defined]
        return vocabulary, is_of_transformers(made)


def _check_positions(model: PretrainedModel, tokens: int) -> None:
    """Raise OptionError if position embeddings are learned and too few; rotary embeddings have no limit."""
    config = model.config().get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if type(limit) is int and 0 < limit < tokens and getattr(config, "rope_parameters", None) is None:
        raise OptionError(f"{{tokens}} {tokens} are more than the {limit} positions of {model.name}: take fewer")


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a byte-level BPE tokenizer, which can encode any text; the same texts give the same tokenizer.

    It has ``vocabulary`` tokens, or fewer if the texts do not have enough pairs.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(batches(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
