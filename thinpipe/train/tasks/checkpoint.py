"""Pretrained weights and tokenizers: a local folder as ``save_pretrained`` writes it, or a checkpoint of the hub."""

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
_NEW = "classifier"  # name prefix of the tensors that are new if the classes differ


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The location of a task's checkpoint."""

    task: str
    kind: str  # the model_type that its config.json must name
    path: Path | None  # None: from the hub
    checkpoint: str | None  # name on the hub

    @classmethod
    def of(cls, source: Source, *, task: str, kind: str, checkpoint: str | None) -> Weights | None:
        """Return the checkpoint that a source names, after checking that it exists; None for random weights."""
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
        """Return the checkpoint's config; raise ValueError if there is none, or if it is of another model."""
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
        """Return a number of the config; raise ValueError if it has none of this name."""
        value = self.config().get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"the config.json of {self._name} should say {name}, a whole number; it says {value!r}")
        return value

    def load(self, model: Any, classes: int) -> nn.Module:
        """Return the model; its classifier is new if the checkpoint has other classes."""
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
        """Return the checkpoint's tokenizer."""
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
        """The file of pickled weights, for errors in which transformers does not name it; None if there is none."""
        assert self.path is not None
        file = self.path / "pytorch_model.bin"
        return file if file.is_file() and not any(self.path.glob("*.safetensors")) else None

    @property
    def _name(self) -> str:
        return str(self.path or self.checkpoint)


def _check_safetensors(file: Path) -> None:
    """Raise ValueError if a file's header is broken or exceeds the file: transformers would not name the file."""
    from safetensors import safe_open

    check_regular(file, "safetensors")
    with errors_named(file, "safetensors", _BRING), safe_open(file, framework="pt"):
        pass
