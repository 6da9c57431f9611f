"""Pretrained weights and tokenizers: a folder on disk as ``save_pretrained`` writes it, or a checkpoint of the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from thinpipe.workloads.hub import load_checkpoint
from thinpipe.workloads.task import Source


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
            raise ValueError("--width is for random weights, a checkpoint has its own: leave it or add --no-pretrained")
        weights = cls(task=task, kind=kind, path=source.weights, checkpoint=checkpoint)
        weights.config()
        return weights

    def config(self) -> dict[str, Any]:
        """The checkpoint's own description; ValueError if there is none, or if it is of another model."""
        if self.path is not None:
            file = self.path / "config.json"
            if not file.is_file():
                raise ValueError(
                    f"--weights is a folder with config.json and weights, and {self.path} has no {file.name}"
                )
            config = json.loads(file.read_text())
        else:
            from transformers import PreTrainedConfig

            config, _ = self._loaded(PreTrainedConfig.get_config_dict)
        if config.get("model_type") != self.kind:
            raise ValueError(
                f"task {self.task} takes weights of a {self.kind}; {self._name} are of a {config.get('model_type')}"
            )
        return config

    def load(self, model: Any, classes: int) -> nn.Module:
        """The model, its classifier made anew if the checkpoint's has other classes."""
        options = {"num_labels": classes, "ignore_mismatched_sizes": True}
        with _quiet():
            return self._loaded(model.from_pretrained, **options)

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        from transformers import AutoTokenizer

        return self._loaded(AutoTokenizer.from_pretrained)

    def _loaded(self, load: Callable[..., Any], **options: Any) -> Any:
        if self.path is None:
            assert self.checkpoint is not None
            return load_checkpoint(self.task, self.checkpoint, load, **options)
        try:
            return load(str(self.path), local_files_only=True, **options)
        except (OSError, ValueError) as error:  # a file that is missing or broken; transformers names it
            raise ValueError(f"--weights {self.path} cannot be read: {error}") from None

    @property
    def _name(self) -> str:
        return str(self.path or self.checkpoint)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bar and its report that the classifier is new: every worker would print both."""
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
