"""The trainable part of a model: all parameters, those not frozen, or low-rank adapters on its blocks (LoRA, by peft).

A layer that gets an adapter is wrapped in place:

    model.layers.0.self_attn.q_proj.weight  ->  ....q_proj.base_layer.weight    frozen
                                                ....q_proj.lora_A.default.weight
                                                ....q_proj.lora_B.default.weight

The model remains a transformers model and is cut as any other. Its own weights are loaded under their plain names, with
the adapters removed for that time. Adapter weights are drawn from the seed and the layer's name alone, so they do not
depend on how the model is cut. peft is imported only when adapters are used.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinpipe.codecs.rounding import rounding_key
from thinpipe.options import OptionError
from thinpipe.train.models.blocks import candidates
from thinpipe.train.models.remote import fetched
from thinpipe.train.models.save import ModelForm, empty_like, saved_files
from thinpipe.train.models.weights import LoadWeights, materialize, open_tensors, params_on_meta, set_parameter

ALL = "all-linear"  # target for all linear layers; the same name as in peft
MOST_RANK = 4096
_NAME = "default"  # name of the adapter; peft's default
ADAPTER_FILE = "adapter_model.safetensors"  # peft's file name
# Model types with a layer whose weights are used without calling it; peft rejects adapters on such a layer.
_FUSED, _NOT_CALLED = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "out_proj"
# peft's task type, by the suffix of the model's class name.
_PURPOSES = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The requested LoRA configuration."""

    rank: int
    targets: tuple[str, ...] = ()  # names of layers in the blocks; empty: the usual ones of the architecture
    alpha: float | None = None  # the update is scaled by alpha / rank; None: by 2
    dropout: float = 0.0


@dataclass(frozen=True)
class Adapted:
    """A model of which a part is trained."""

    model: nn.Module
    config: Any  # peft's; None without adapters
    seed: int
    saved: Path | None = None  # file to read the adapters and a classifier's head from; None: drawn at random

    def loader(self, load: LoadWeights | None) -> LoadWeights | None:
        """Return a function that loads plain and adapter parameters, given the one that loads the plain model."""
        if load is None or self.config is None:
            return load

        def load_both(model: nn.Module, names: Iterable[str]) -> None:
            own = set(adapter_names(model) if self.saved is None else exported_names(model))
            wanted = set(names)
            with without_adapters(model):
                load(model, [plain_name(name) for name in sorted(wanted - own)])
            if self.saved is None:
                draw(model, wanted & own, self.seed)
            else:
                load_adapters(model, wanted & own, self.saved)

        return load_both


def adapt(model: nn.Module, lora: Lora | None, frozen: Iterable[str], seed: int) -> Adapted:
    """Freeze all parameters except those to be trained, in place; parameters on the meta device stay there.

    ``frozen`` holds name patterns of parameters. Raises OptionError if a pattern matches none or nothing is left to
    train.
    """
    config = None if lora is None else _add(model, lora)
    if config is not None and not is_on_meta(model):
        draw(model, adapter_names(model), seed)
    parameters = {plain_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}
    for pattern in frozen:
        found = [each for name, each in parameters.items() if fnmatchcase(name, pattern)]
        if not found:
            raise OptionError(
                f"{{freeze}} is a pattern of names of parameters, as in '{_pattern(parameters)}'; {pattern!r} matches "
                f"none of the {len(parameters)} of {type(model).__name__}"
            )
        for each in found:
            each.requires_grad_(False)
    if not any(each.requires_grad for each in parameters.values()):
        raise OptionError("{freeze} leaves nothing to be trained: freeze less")
    return Adapted(model, config, seed)


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of all adapter parameters."""
    return [
        f"{path}.{name}"
        for path, layer in adapter_layers(model).items()
        for name, _ in layer.named_parameters()
        if not name.startswith("base_layer.")
    ]


def exported_names(model: Any) -> list[str]:
    """Return the names of the parameters that peft saves: adapters and a classifier's head; none without adapters."""
    adapters = adapter_names(model)
    if not adapters:
        return []
    heads = tuple(f"{name}." for name in model.peft_config[_NAME].modules_to_save or ())
    return adapters + [name for name, _ in model.named_parameters() if name.startswith(heads)]


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def saved_name(name: str) -> str:
    """Return the name under which peft saves a parameter: without the adapter's name."""
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Remove the adapters temporarily; the plain model has the same parameter objects."""
    layers = adapter_layers(model)
    _put(model, {path: layer.base_layer for path, layer in layers.items()})
    try:
        yield
    finally:
        _put(model, layers)


def merge(module: nn.Module) -> None:
    """Merge adapters into the weights that they belong to, in place."""
    from peft.tuners.lora import LoraLayer

    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            layer.merge()


def merged(model: nn.Module, plain: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return some weights of a model on the meta device, by plain name, with their adapters merged."""
    found = dict(plain)
    for path, layer in adapter_layers(model).items():
        given = {
            name: adapters.get(f"{path}.{name}", plain.get(plain_name(f"{path}.{name}"))) for name in layer.state_dict()
        }
        if all(each is not None for each in given.values()):
            layer.load_state_dict(given, assign=True)
            layer.merge()
            found |= {f"{path}.{name}": each for name, each in layer.base_layer.state_dict().items()}
            layer.to("meta")
    return found


def draw(model: nn.Module, wanted: Iterable[str], seed: int) -> None:
    """Initialize these adapters as peft does, so that the model's output does not change."""
    own = set(wanted)
    for path, layer in adapter_layers(model).items():
        mine = {name for name, _ in layer.named_parameters() if f"{path}.{name}" in own}
        if not mine:
            continue
        for owner, module in layer.named_modules():
            materialize(module, [name for name in module._parameters if f"{owner}.{name}" in mine])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rounding_key(seed, *f"{path}.lora".encode()))  # not the weights' seed
            layer.reset_lora_parameters(_NAME, True)


open_adapters = partial(open_tensors, what="adapters", remedy="bring the file that peft wrote")


def load_adapters(model: nn.Module, wanted: Iterable[str], file: Path) -> None:
    """Set these parameters to the values that peft saved; other tensors are not read."""
    wanted = sorted(wanted)
    folder = fetched(file.parent, wanted, lambda names: {saved_name(name) for name in names}.__contains__)
    with open_adapters(folder / file.name) as saved:
        for name in wanted:
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            dtype = module.get_parameter(last).dtype
            set_parameter(module, last, saved.get_tensor(saved_name(name)).to(dtype, copy=True))  # not mapped pages


class AdapterForm(ModelForm):
    """The file layout of adapters as peft writes them, including a classifier's head, which is new."""

    def __init__(self, adapted: Adapted, base: str | None) -> None:
        """``base`` is the name of the base model."""
        model, self._config = adapted.model, adapted.config
        self._config.base_model_name_or_path, self._config.inference_mode = base, True
        self._config.target_modules = sorted(self._config.target_modules)  # a set, whose order changes between runs
        self.name, self.twin = type(model).__name__, None
        parameters = dict(model.named_parameters())
        self.held = self.tensors = {name: empty_like(parameters[name]) for name in exported_names(model)}
        self._kept = {name: name for name in self.held}
        self.groups = {name: [name] for name in self.held}
        made = self.converted(self.held)
        self._set_files({ADAPTER_FILE: made}, dict.fromkeys(made, ADAPTER_FILE))

    def converted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under the names that peft saves."""
        return {saved_name(name): each for name, each in tensors.items()}

    def small_files(self) -> dict[str, bytes]:
        return saved_files(self._config.save_pretrained)


def inject(model: nn.Module, config: Any) -> None:
    """Let peft insert its layers in place; on the meta device if the model is there."""
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with params_on_meta() if is_on_meta(model) else nullcontext():
            inject_adapter_in_model(config, model)


def is_on_meta(model: nn.Module) -> bool:
    return any(each.is_meta for each in model.parameters())


def _add(model: Any, lora: Lora) -> Any:
    if not hasattr(model, "base_model_prefix"):
        raise OptionError(
            f"{{lora}} adapts models of transformers, and this is a {type(model).__name__}: leave it out; {{freeze}} "
            "freezes parts of any model"
        )
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    heads = heads_of(model)
    targets, layers = _targets(model, lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, 2 * lora.rank if lora.alpha is None else lora.alpha),  # any number will do
        lora_dropout=lora.dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers),
        task_type=next((kind for end, kind in _PURPOSES.items() if type(model).__name__.endswith(end)), None),
    )
    try:
        inject(model, config)
    except (ValueError, NotImplementedError) as error:
        raise OptionError(f"{{lora}}: peft has no adapter for these layers: {error}") from None
    config.modules_to_save = heads or None  # set only now: earlier, peft would replace the heads by copies
    for name in heads:
        model.get_submodule(name).requires_grad_(True)
    return config


def heads_of(model: Any) -> list[str]:
    """Return the names of a classifier's modules outside its base model: new for a data set, and so trained."""
    if not type(model).__name__.endswith("Classification"):
        return []
    blocks = list(candidates(model))
    return [
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix
        and any(True for _ in child.parameters())
        and not any(path.startswith(f"{name}.") for path in blocks)
    ]


def _targets(model: Any, requested: tuple[str, ...]) -> tuple[list[str], list[nn.Module]]:
    """Return the layers that get an adapter, by the names that peft takes, and the layer modules."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL
    from transformers.pytorch_utils import Conv1D

    inside = {
        f"{path}.{name}": layer
        for path, block in candidates(model).items()
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear | Conv1D | nn.Conv2d)
    }
    kind = model.config.model_type
    linear = [
        path
        for path, layer in inside.items()
        if not isinstance(layer, nn.Conv2d) and not (kind in _FUSED and path.endswith(f".{_NOT_CALLED}"))
    ]
    known = sorted({path.rpartition(".")[2] for path in inside})
    for name in requested:
        if name != ALL and not _matching([name], inside):
            raise OptionError(
                f"{{lora_target}} names layers in the blocks of {type(model).__name__}: {ALL}, or some of "
                f"{', '.join(known)}; got {name}"
            )
    wanted = _matching(requested or tuple(USUAL.get(kind, ())), inside)
    if ALL in requested or not wanted:
        wanted = list(dict.fromkeys([*wanted, *linear]))
    if not wanted:
        names = f": name some with {{lora_target}}, of {', '.join(known)}" if known else ""
        raise OptionError(f"the blocks of {type(model).__name__} have no linear layers for {{lora}}{names}")
    # By their last names if these match no other layers: so people read and share a config.
    short = sorted({path.rpartition(".")[2] for path in wanted})
    meant = _matching(short, dict(model.named_modules()))
    return short if set(meant) == set(wanted) else sorted(wanted), [inside[path] for path in wanted]


def _matching(names: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Return the paths that match a name, by peft's rule."""
    ends = tuple(f".{name}" for name in names)
    return [path for path in paths if f".{path}".endswith(ends)] if ends else []


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that have an adapter, by their paths."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}


def _put(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = layer


def _pattern(names: Iterable[str]) -> str:
    """Return an example pattern that matches some of these names."""
    first = next(iter(names))
    return re.sub(r"[^.]+$", "*", first)
