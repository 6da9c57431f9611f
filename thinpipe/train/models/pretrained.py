"""A transformers model as a folder with a config, weights and perhaps a tokenizer, or a config with random weights.

A config alone is a folder without weights, or the bare name of a model type.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinpipe.options import OptionError
from thinpipe.system.files import check_folder, errors_named
from thinpipe.system.sanitize import first_line
from thinpipe.system.sizes import check_fits
from thinpipe.train.models.decoding import check_generates
from thinpipe.train.models.description import WHAT, check_code, check_counts, read_description
from thinpipe.train.models.packed import can_pack
from thinpipe.train.models.tiny import LAYERS, shrunken
from thinpipe.train.models.verify import TRAINING, batch, compare, types_of
from thinpipe.train.models.weights import BRING, LoadWeights, load_weights, params_on_meta, random_weights, weight_files

# Kind, as in ``verify.KINDS`` -> transformers class that builds it, and its description in error messages.
_BUILDERS = {
    "causal": ("AutoModelForCausalLM", "causal language models"),
    "sequence": ("AutoModelForSequenceClassification", "classifiers of text"),
    "image": ("AutoModelForImageClassification", "classifiers of images"),
}
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model"),
)
FLASH = "flash_attention_2"
ADAPTER = "adapter_config.json"  # in a folder that peft wrote
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")  # tokens that begin, end and pad a text


@dataclass(frozen=True)
class PretrainedModel:
    """A folder that ``save_pretrained`` wrote, or its config, with a model of one kind; ValueError for others."""

    folder: Path | None  # None: use ``model_type``
    kind: str
    option: str = "model"  # that names the folder, for error messages
    model_type: str | None = None  # transformers model type, as in "llama", instead of a folder
    changes: Mapping[str, Any] = field(default_factory=dict)  # overrides of the config
    tokens: Mapping[str, Any] = field(default_factory=dict)  # overrides that follow from a tokenizer
    has_weights: bool = True  # False: random weights, even if the folder has some
    tokenizer_folder: Path | None = None  # None: the model's own
    trusted: bool = False  # True: run code that comes with the model
    classes: int | None = None  # number of classes of a classifier; None: as in the config
    labels: Sequence[str] | None = None  # their names; None: not known here
    dtype: str = "float32"  # of the weights, torch's name
    attention: str | None = None  # implementation, transformers' name; None: transformers' choice

    @property
    def name(self) -> str:
        return str(self.folder) if self.folder is not None else f"the model type {self.model_type}"

    def config(self) -> Any:
        """Return a new copy of the config with all overrides; its file is read once per process."""
        config = self._of_type() if self.folder is None else self._of_folder()
        text = config.get_text_config()
        for name, value in self.tokens.items():
            setattr(text, name, value)
        if self.classes is not None:
            config.num_labels = self.classes
            config.problem_type = "single_label_classification"
        if self.labels is not None:
            config.id2label = dict(enumerate(self.labels))
            config.label2id = {label: number for number, label in enumerate(self.labels)}
        return config

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model has embeddings for."""
        return int(self.config().get_text_config().vocab_size)

    def facts(self) -> Mapping[str, Any]:
        """Return the contents of the folder's config.json."""
        file = self._config_file()
        return _read_facts(file, _version(file), trusted=self.trusted)

    def number(self, name: str) -> int:
        """Return a number of config.json; raise ValueError if it has none of this name."""
        value = self.facts().get(name)
        if type(value) is not int or value < 0:
            raise ValueError(f"the config.json of {self.name} should have {name}, a whole number; it has {value!r}")
        return value

    def _of_type(self) -> Any:
        from transformers import AutoConfig

        if self.model_type not in types_of(self.kind):
            raise ValueError(f"{_BUILDERS[self.kind][1]} of transformers are trained here; {self.model_type!r} is none")
        with quiet():
            self._check_changes(AutoConfig.for_model(self.model_type))
            with errors_named(self._changed(), WHAT, "give other values"):
                return AutoConfig.for_model(self.model_type, **self.changes)

    def _of_folder(self) -> Any:
        file, facts = self._config_file(), self.facts()
        code, (builder, models) = facts.get("auto_map"), _BUILDERS[self.kind]
        known = facts.get("model_type") in types_of(self.kind)
        if not known and not (isinstance(code, dict) and builder in code):
            found = repr(facts.get("model_type"))
            raise ValueError(f"{models} of transformers are trained here; {file} describes a {found}")
        config = copy.deepcopy(_read_config(file, _version(file), trusted=self.trusted))
        if self.changes:
            self._check_changes(config)
            with errors_named(self._changed(), WHAT, "give other values"), quiet():
                name, config = config._name_or_path, type(config)(**{**facts, **self.changes})
            config._name_or_path = name  # where its code is, if that comes with it
        return config

    def _config_file(self) -> Path:
        assert self.folder is not None
        file = self.folder / "config.json"
        if file.is_file():
            return file
        if self.folder.is_dir():
            check_folder(self.folder, "a model")
        problem = f"no {file.name}"
        if (self.folder / ADAPTER).is_file():
            problem = "adapters alone: evaluate and generate take it as {adapter}, for all else export it with {merge}"
        raise OptionError(f"{{{self.option}}} is a folder that save_pretrained wrote, and {self.folder} has {problem}")

    def _check_changes(self, config: Any) -> None:
        unknown = [name for name in self.changes if not hasattr(config, name)]
        if unknown:
            raise OptionError(f"{{config_set}}: the config of a {config.model_type} has no {unknown[0]}")
        check_counts("{config_set}", self.changes)
        if not self.trusted:
            check_code("{config_set}", self.changes)

    def _changed(self) -> str:
        changes = ", ".join(f"{name}={value}" for name, value in self.changes.items())
        return f"{self.name} with {changes}" if changes else self.name

    @property
    def has_tokenizer(self) -> bool:
        folder = self.tokenizer_folder or self.folder
        return folder is not None and has_tokenizer(folder)

    def tokenizer(self) -> Any:
        folder = self.tokenizer_folder or self.folder
        assert folder is not None, "check has_tokenizer first"
        return read_tokenizer(folder, trusted=self.trusted)

    @property
    def trains_tokenizer(self) -> bool:
        """True if the model has no tokenizer and no weights that depend on one."""
        return not self.has_weights and self.tokenizer_folder is None and not self.has_tokenizer

    @property
    def follows_tokenizer(self) -> bool:
        """True if vocabulary and special tokens follow the tokenizer: a new model with a tokenizer from elsewhere."""
        return self.trains_tokenizer or (not self.has_weights and self.tokenizer_folder is not None)

    def fitted(self, vocabulary: int, special: Sequence[int | None]) -> PretrainedModel:
        """Return the same model for a tokenizer with ``vocabulary`` tokens and these begin, end and padding tokens."""
        return replace(self, tokens={"vocab_size": vocabulary, **dict(zip(SPECIAL, special, strict=True))})

    def fitted_to(self, tokenizer: Any) -> PretrainedModel:
        """Return the model for this tokenizer; raise ValueError if it has its own vocabulary with fewer tokens."""
        if self.follows_tokenizer:
            return self.fitted(len(tokenizer), special_tokens(tokenizer))
        check_vocabulary(len(tokenizer), self.vocabulary, str(self.tokenizer_folder or self.name))
        return self

    def check_weights(self, *, pretrained: bool = True) -> None:
        """Raise ValueError unless every tensor fits into memory, the files of weights are there, and {attention} is."""
        if self.attention == FLASH and find_spec("flash_attn") is None:
            raise OptionError(
                "{attention} flash_attention_2 needs the package flash_attn, which is not installed: install it, or "
                "take {attention} sdpa"
            )
        self._check_sizes()
        if pretrained and self.has_weights:
            assert self.folder is not None
            self._config_file()
            weight_files(self.folder)

    def _check_sizes(self) -> None:
        """Raise OptionError if a tensor does not fit into memory: every worker allocates each, if only for a moment."""
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]), quiet():
                model = self._built(self.config())
        except ValueError as error:
            if "meta" in str(error):  # code that reads values, which the meta device has not; it runs on real tensors
                return
            raise
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        largest = max(tensors, key=lambda name: tensors[name].nbytes)
        check_fits(f"{self._changed()}: its tensor {largest}", tensors[largest].nbytes, "describe another")

    def init_on_meta(self) -> nn.Module:
        """Return the model on the meta device, without weights."""
        with params_on_meta(), quiet():
            return self._built(self.config())

    def weight_loader(self, *, pretrained: bool, seed: int | None) -> LoadWeights:
        """Return a function that loads parameters of the model, by name, from the folder or at random.

        A classifier's head is also random if the folder has none, or one for other classes. Without a seed, random
        values come from torch's generator.
        """
        draw: LoadWeights = partial(random_weights, seed=seed)
        folder = self.folder
        if not pretrained or not self.has_weights or folder is None:
            return draw

        def load(model: nn.Module, names: Iterable[str]) -> None:
            with quiet():
                load_weights(model, folder, names, None if self.kind == "causal" else draw)

        return load

    def with_weights(self) -> nn.Module:
        """Return the complete model with its weights; a head that the folder does not have is random."""
        model = self.init_on_meta()
        self.weight_loader(pretrained=True, seed=None)(model, list(model.state_dict()))
        return model.eval()

    def generation_config(self, model: Any) -> Any:
        """Return the model's own generation config: which tokens end a text, what is not repeated."""
        from transformers import GenerationConfig

        file = None if self.folder is None else self.folder / "generation_config.json"
        if file is None or not file.is_file():
            return copy.deepcopy(model.generation_config)
        with errors_named(file, "how a model generates", BRING):
            return GenerationConfig.from_pretrained(str(self.folder), local_files_only=True)

    def check_generates(self) -> None:
        """Raise ValueError unless a small copy generates the same in pieces as uncut; takes seconds, before a run."""
        with torch.random.fork_rng(devices=[]), quiet():
            check_generates(_small_copy(self.config(), self._built).eval())

    def check_cut(self) -> None:
        """Raise ValueError unless all tensors fit into memory and a small copy computes the same in units as uncut."""
        self._check_sizes()
        try:
            # On a CPU, where flash attention cannot compute: its layers are checked with transformers' choice.
            model = replace(self, attention=None) if self.attention == FLASH else self
            check_cut(model.config(), model._built, model.kind)
        except RuntimeError as error:  # raised by code that mixes dtypes
            if self.dtype == "float32":
                raise
            raise OptionError(
                f"the code of {self.name} does not go with {{dtype}} {self.dtype}: {first_line(error)}"
            ) from None

    def can_pack(self) -> bool:
        """Return True if a small copy computes packed texts as it does each alone."""
        if self.attention == FLASH:  # its code finds packed texts in batches of one row alone
            return False
        with torch.random.fork_rng(devices=[]), quiet():
            return can_pack(_small_copy(self.config(), self._built))

    def _built(self, config: Any) -> nn.Module:
        import transformers

        builder = getattr(transformers, _BUILDERS[self.kind][0])
        options = {} if self.attention is None else {"attn_implementation": self.attention}
        with errors_named(self._changed(), "a model", "describe another"):
            model: nn.Module = builder.from_config(
                config, dtype=getattr(torch, self.dtype), trust_remote_code=self.trusted, **options
            )
        return model


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def read_tokenizer(folder: Path, *, trusted: bool) -> Any:
    from transformers import AutoTokenizer

    check_folder(folder, "a tokenizer")
    remedy = "save the model's own there: tokenizer.save_pretrained(...)"
    with errors_named(folder, "a tokenizer", remedy), quiet():
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trusted)


@lru_cache(maxsize=8)
def _read_facts(file: Path, version: tuple[int, ...], *, trusted: bool) -> Mapping[str, Any]:
    """Return the contents of a config.json; ``version`` distinguishes the contents of one path."""
    check_folder(file.parent, "a model")
    return read_description(file, trusted=trusted)


@lru_cache(maxsize=8)
def _read_config(file: Path, version: tuple[int, ...], *, trusted: bool) -> Any:
    """Return transformers' config of a folder that was checked."""
    from transformers import AutoConfig

    with errors_named(file, WHAT, BRING), quiet():
        return AutoConfig.from_pretrained(str(file.parent), local_files_only=True, trust_remote_code=trusted)


def _version(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def special_tokens(tokenizer: Any) -> list[int | None]:
    return [getattr(tokenizer, name) for name in SPECIAL]


def check_vocabulary(known: int, embedded: int, where: str) -> None:
    """Raise ValueError if a tokenizer has more tokens than the model has embeddings."""
    if known > embedded:
        raise ValueError(
            f"the tokenizer in {where} knows {known} tokens, and the model has embeddings for {embedded}: they are not "
            "of one model"
        )


def check_cut(config: Any, build: Callable[[Any], nn.Module], kind: str) -> None:
    """Raise ValueError unless a small copy of the described model computes the same in units as uncut."""
    with torch.random.fork_rng(devices=[]), quiet():
        model = _small_copy(config, build).train(config.model_type in TRAINING)
        made = batch(model, kind)
        dtype = next(model.parameters()).dtype
        inputs = {name: each.to(dtype) if each.is_floating_point() else each for name, each in made.items()}
    compared = compare(model, inputs, alone=LAYERS)
    if not compared.is_exact or compared.needs_weights_elsewhere is not None:
        where = compared.first_difference or compared.needs_weights_elsewhere or "its gradients"
        raise ValueError(f"{type(model).__name__} cannot be cut: in units it computes something else ({where})")


def _small_copy(config: Any, build: Callable[[Any], nn.Module]) -> nn.Module:
    """Return a small model of the same structure, with weights from torch's generator, which is seeded."""
    small = shrunken(config)
    small._name_or_path = config._name_or_path
    torch.manual_seed(0)
    return build(small)


@contextmanager
def quiet() -> Iterator[None]:
    """Disable transformers' progress bars and reports: every worker would print them."""
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
