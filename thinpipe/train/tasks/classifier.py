"""Classification with any transformers model in place of a task's own, with a head for the classes of the data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from thinpipe.options import OptionError
from thinpipe.system.sanitize import first_line
from thinpipe.train.models.cut import CutModel
from thinpipe.train.models.description import read_object
from thinpipe.train.models.function import FunctionModel
from thinpipe.train.models.pretrained import SPECIAL, PretrainedModel
from thinpipe.train.tasks.pictures import HALF, Colours, to_model
from thinpipe.train.tasks.sources import (
    DESCRIBING_OPTIONS,
    Model,
    ModelTask,
    checkpoint_of,
    chosen_model,
    reject_unused_options,
)
from thinpipe.train.tasks.task import Shape, Source

_WEIGHTS = "a model that is named has its own size and weights"
IMAGE_PROCESSOR = "preprocessor_config.json"
_PROCESSOR = "the description of a model's images"
_USUAL_SIZE = 224  # pixels, if neither the model nor its folder gives a size


class ClassifierTask(ModelTask):
    """The common part of tasks that have their own model and can also train any other."""

    kind: ClassVar[Literal["sequence", "image"]]
    own_type: ClassVar[str]  # model type of the task's own model
    checkpoint: str | None  # repository of the hub with its public weights
    sizes: ClassVar[tuple[str, ...]]  # fields of Source: the size of samples, and perhaps the tokenizer
    places: ClassVar[tuple[str, ...]] = ("data",)  # fields of Source that locate samples

    def model(self, source: Source) -> Model | None:
        if source.model is None and source.config is None:
            return None
        reject_unused_options(self.name, source, (*self.places, *DESCRIBING_OPTIONS, *self.sizes, "samples"), _WEIGHTS)
        return chosen_model(source, self.kind)

    def own_checkpoint(self, source: Source) -> PretrainedModel | None:
        """Return the checkpoint to start from, or None; raise ValueError for invalid options."""
        reject_unused_options(self.name, source, (*self.places, "weights", self.sizes[0], "width", "samples"))
        return checkpoint_of(
            source, task=self.name, kind=self.kind, model_type=self.own_type, checkpoint=self.checkpoint
        )

    def check_options(self, source: Source) -> None:
        """Raise ValueError for invalid options or for missing weights."""
        if self.model(source) is None:
            self.own_units(source)

    def preflight(self, source: Source) -> int | None:
        model = self.model(source)
        if model is None:
            return self.own_units(source)
        model.check_weights(pretrained=source.pretrained)
        if isinstance(model, PretrainedModel):
            self.check_size(model, source)
        return None

    def weight_bytes(self, source: Source) -> int:
        has_own = self.model(source) is None and self.own_checkpoint(source) is None
        return self.own_bytes(1.0 if source.width is None else source.width) if has_own else 0

    @abstractmethod
    def own_units(self, source: Source) -> int:
        """Return the number of units of the task's own model; raise ValueError for invalid options."""

    @abstractmethod
    def own_bytes(self, width: float) -> int:
        """Return a lower bound of the bytes of the own model's random weights."""

    @abstractmethod
    def check_size(self, model: PretrainedModel, source: Source) -> None:
        """Raise ValueError if the model cannot take samples of the requested size."""


# Texts


def padded_tokenizer(model: Model) -> Any:
    """Return the model's tokenizer, with a padding token; raise ValueError if there is none."""
    if isinstance(model, PretrainedModel) and model.trains_tokenizer:
        raise OptionError(f"{model.name} has no tokenizer: name one with {{tokenizer}}")
    tokenizer = model.tokenizer()
    if tokenizer.pad_token_id is None:
        # Padding is masked, so any token will do; models made only to continue texts come without a padding token.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer of {model.name} has no token to fill up texts with; give it one, "
            "tokenizer.pad_token = ..., and save it again"
        )
    return tokenizer


def fitted(model: PretrainedModel, tokenizer: Any, shape: Shape) -> tuple[PretrainedModel, Shape]:
    """Return the model fitted to this tokenizer, and its shape; raise ValueError if they do not match."""
    text = model.fitted_to(tokenizer).config().get_text_config()
    special = [*(getattr(text, name, None) for name in SPECIAL[:-1]), tokenizer.pad_token_id]
    return model.fitted(int(text.vocab_size), special), replace(shape, vocabulary=int(text.vocab_size), special=special)


def check_positions(model: PretrainedModel, tokens: int) -> None:
    """Raise OptionError if texts are longer than the model has learned positions for."""
    for name, module in model.init_on_meta().named_modules():
        learned = isinstance(module, nn.Embedding) and ("pos" in name or name.endswith("wpe"))
        if learned:
            before = int(getattr(module, "offset", 0))  # positions that stand for no token
            if module.padding_idx is not None:
                before = max(before, module.padding_idx + 1)
            check_length(tokens, module.num_embeddings - before)


def check_length(tokens: int, most: int) -> None:
    """Raise OptionError if texts are longer than a model takes."""
    if tokens > most:
        raise OptionError(f"these weights take texts of up to {most} tokens; got {{tokens}} {tokens}")


# Images


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """The format of the images that a model takes."""

    size: int  # pixels, height and width
    colours: Colours = HALF
    dtype: torch.dtype = torch.float32

    def prepare(self, images: Tensor) -> Tensor:
        """Return images of any size and range in the model's format."""
        return to_model(images, self.size, self.colours).to(self.dtype)


def image_format(model: Model) -> ImageFormat:
    """Return the format given by the image processor's file in the model's folder, or else by the model's config."""
    if isinstance(model, FunctionModel):
        return ImageFormat(size=_USUAL_SIZE)
    return replace(_described_format(model), dtype=getattr(torch, model.dtype))


def _described_format(model: PretrainedModel) -> ImageFormat:
    described = _edge(model.name, getattr(model.config(), "image_size", None)) or _USUAL_SIZE
    file = None if model.folder is None else model.folder / IMAGE_PROCESSOR
    if file is None or not file.is_file():
        return ImageFormat(size=described)
    facts = read_object(file, _PROCESSOR)
    cut = facts.get("crop_size") if facts.get("do_center_crop", True) else None
    size = _edge(file, cut) or _edge(file, facts.get("size")) or described
    if facts.get("do_normalize") is False:
        return ImageFormat(size=size, colours=Colours(mean=(0.0,) * 3, deviation=(1.0,) * 3))
    mean, deviation = (_three(file, name, facts.get(name), default) for name, default in _COLOURS)
    return ImageFormat(size=size, colours=Colours(mean=mean, deviation=deviation))


_COLOURS = (("image_mean", HALF.mean), ("image_std", HALF.deviation))


def _edge(file: Path | str, size: Any) -> int | None:
    """Return a size in pixels, given as a number, as both edges, or as the shorter edge."""
    if isinstance(size, dict):
        edges = [size[name] for name in ("height", "width", "shortest_edge") if size.get(name) is not None]
    else:
        edges = list(size) if isinstance(size, list | tuple) else [size]
    if not edges or edges[0] is None:
        return None
    if any(type(edge) is not int or edge < 1 or edge != edges[0] for edge in edges):
        raise ValueError(f"{file} asks for images of {size}, and thinpipe makes square ones: name another model")
    return int(edges[0])


def _three(file: Path, name: str, values: Any, default: tuple[float, ...]) -> tuple[float, ...]:
    if values is None:
        return default
    values = values if isinstance(values, list) else [values] * 3
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) != 3 or len(values) != 3 or (name == "image_std" and min(numbers) <= 0):
        raise ValueError(f"{file} should give {name} as three numbers, one for each colour; it has {values}")
    return tuple(numbers)


def check_images(model: PretrainedModel, size: int) -> None:
    """Raise OptionError if the model's code does not take images of this size."""
    made = model.init_on_meta()
    try:
        CutModel(made, {"pixel_values": torch.zeros(2, 3, size, size, dtype=getattr(torch, model.dtype))})
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise OptionError(
            f"{model.name} does not take images of {size} x {size} pixels in three colours ({{image_size}}): "
            f"{first_line(error)}"
        ) from None


def ordered_names(names: Iterable[Any], classes: int) -> tuple[str, ...] | None:
    """Return the names of all classes, by their numbers; None if their number differs."""
    found = tuple(map(str, names))
    return found if len(found) == classes else None
