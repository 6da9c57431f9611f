"""Pretrained weights and tokenizers: a folder on disk as ``save_pretrained`` writes it, or a checkpoint of the hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from thinpipe.options import OptionError
from thinpipe.system.files import check_folder, check_regular, errors_named
from thinpipe.train.models.description import read_description
from thinpipe.train.models.pretrained import quiet
from thinpipe.train.models.weights import indexed_files
from thinpipe.train.tasks.hub import load_checkpoint
from thinpipe.train.tasks.task import Source

_BRING = "bring the model's own"
_NEW = "classifier"  # what is made anew where the classes are others


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Where a task's checkpoint is."""

    task: str
    kind: str  # the model_type that its config.json must name
    path: Path | None  # None: from the hub
    checkpoint: str | None  # of the hub

    @classmethod
    def of(cls, source: Source, *, task: str, kind: str, checkpoint: str | None) -> Weights | None:
        """The checkpoint that a source asks for, looked for at once; None for random weights."""
        if source.weights is None and (checkpoint is None or not source.pretrained):
            return None
        if source.width is not None:
            raise OptionError(
                "{width} is for random weights, a checkpoint has its own: leave it or add {no_pretrained}"
            )
        weights = cls(task=task, kind=kind, path=source.weights, checkpoint=checkpoint)
        weights.config()
        return weights

    def config(self) -> dict[str, Any]:
        """The checkpoint's own description; ValueError if there is none, or if it is of another model."""
        if self.path is not None:
            file = self.path / "config.json"
            if not file.is_file():
                raise OptionError(
                    f"{{weights}} is a folder with config.json and weights, and {self.path} has no {file.name}"
                )
            check_folder(self.path, f"weights of a {self.kind}")
            config = read_description(file, trusted=False)
        else:
            from transformers import PreTrainedConfig

            config, _ = self._loaded(PreTrainedConfig.get_config_dict)
        if config.get("model_type") != self.kind:
            raise ValueError(
                f"task {self.task} takes weights of a {self.kind}; {self._name} are of a {config.get('model_type')}"
            )
        return config

    def number(self, name: str) -> int:
        """A number that the description gives; ValueError if it gives none."""
        value = self.config().get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"the config.json of {self._name} should say {name}, a whole number; it says {value!r}")
        return value

    def load(self, model: Any, classes: int) -> nn.Module:
        """The model, its classifier made anew if the checkpoint's has other classes."""
        options = {"num_labels": classes, "ignore_mismatched_sizes": True, "output_loading_info": True}
        with quiet():
            loaded, report = self._loaded(model.from_pretrained, **options)
        other = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
        random = sorted(name for name in other if not name.startswith(_NEW))
        if random:
            raise ValueError(
                f"the weights of {self._name} are not those that its config.json describes: {len(random)} tensors are "
                f"missing or of another shape, as {random[0]}; bring the model's own"
            )
        return loaded

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        from transformers import AutoTokenizer

        return self._loaded(AutoTokenizer.from_pretrained)

    def _loaded(self, load: Callable[..., Any], **options: Any) -> Any:
        if self.path is None:
            assert self.checkpoint is not None
            return load_checkpoint(self.task, self.checkpoint, load, **options)
        for file in sorted(self.path.glob("*.safetensors")):
            _check_safetensors(file)
        for file in sorted(self.path.glob("*.index.json")):
            indexed_files(file)
        with errors_named(self._weights_file or self.path, f"weights of a {self.kind}", _BRING):
            return load(str(self.path), local_files_only=True, **options)

    @property
    def _weights_file(self) -> Path | None:
        """The file that an error is about if transformers does not say: its name for weights that are pickled."""
        assert self.path is not None
        file = self.path / "pytorch_model.bin"
        return file if file.is_file() and not any(self.path.glob("*.safetensors")) else None

    @property
    def _name(self) -> str:
        return str(self.path or self.checkpoint)


def _check_safetensors(file: Path) -> None:
    """ValueError if a file's header is broken or promises more than there is: transformers would not name the file."""
    from safetensors import safe_open

    check_regular(file, "safetensors")
    with errors_named(file, "safetensors", _BRING), safe_open(file, framework="pt"):
        pass
