"""Verification that a cut model computes bit-identical logits and gradients to the uncut model.

``compare`` checks one model, ``verify`` every model type of transformers, each built small and cut.
"""

from __future__ import annotations

import copy
import logging
import re
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from thinpipe.comm.signals import end_with_parent, signals_blocked, unblock_signals
from thinpipe.train.models.blocks import UncuttableError
from thinpipe.train.models.cut import CutModel
from thinpipe.train.models.forward import call_model, run_until, takes
from thinpipe.train.models.symbolic import SymbolicValueError
from thinpipe.train.models.tiny import ORDINARY_TOKENS, shrunken
from thinpipe.train.models.unit_modules import cut_into_units

Outcome = Literal["exact", "different", "refused", "not buildable"]
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
LIMIT_S = 40.0  # of processor time per type; most take one second
PROCESSES = 2

_INDEXER = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=256, indexer_budget=8, indexer_compress_ratio=2)
# Model type -> values missing in its default config, without which no model can be built, or none worth testing.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 10000.0, "rope_type": "default"}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "t5": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
}
# Model type -> why there is no model of it to verify, where its error does not explain that.
_NO_MODEL = {
    "gemma4_assistant": "drafts for another model, whose keys and values it is given",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it is given",
    "musicgen": "its tokens are codes of sound, several rows a sample",
    "musicgen_melody": "its tokens are codes of sound, several rows a sample",
    "pp_lcnet": "returns no logits",
    "shieldgemma2": "takes a text in addition to the image",
    "siglip2": "takes patches of images, not images",
}
TRAINING = ("levit", "reformer")  # unless in training mode, they keep results between runs


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The largest differences, and the unit where they begin."""

    blocks: int
    logits: float
    gradients: float
    first_difference: str | None  # the unit, as text
    needs_weights_elsewhere: str | None  # why a worker with one block alone could not compute it; None: it can

    @property
    def is_exact(self) -> bool:
        return self.logits == 0 and self.gradients == 0 and self.first_difference is None


def compare(model: nn.Module, inputs: Mapping[str, Tensor], alone: int | None = None) -> Comparison:
    """Run the model uncut, in units, and ``alone`` blocks alone (None: all); UncuttableError if it cannot be cut."""
    unused = copy.deepcopy(model)  # some models keep tensors of their last run
    cut = CutModel(model, inputs)
    wanted, seen = _run_uncut(cut, inputs)
    gradients = _gradients(model, wanted)
    values: tuple[Tensor, ...] = tuple(inputs.values())
    first, given = None, []
    for number, unit in enumerate(cut_into_units(cut)):
        given.append(tuple(value.clone() for value in values))  # blocks may modify their inputs
        values = _run_unit(unit, values, inputs)
        if first is None and number < len(cut.blocks) and not _equal(cut, number, values, inputs, seen[number]):
            first = f"block {number} is called with other values"
    found = _gradients(model, values[0])
    return Comparison(
        blocks=len(cut.blocks),
        logits=_difference(wanted, values[0]),
        gradients=max(
            (_difference(gradients.get(name), found.get(name)) for name in gradients.keys() | found.keys()), default=0.0
        ),
        first_difference=first,
        needs_weights_elsewhere=_run_alone(unused, inputs, given, alone),
    )


def _run_uncut(cut: CutModel, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[int, list[Any]]]:
    """Return the logits of the uncut model, and the arguments of its blocks."""
    seen: dict[int, list[Any]] = {}

    def on_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen[number] = pytree.tree_leaves((args, kwargs))
        return type(cut.blocks[number]).forward(cut.blocks[number], *args, **kwargs)

    return run_until(cut.model, cut.blocks, inputs, on_call, None), seen


def _run_unit(unit: Any, values: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    output = unit(*values, **{name: inputs[name] for name in unit.asks})
    return output if isinstance(output, tuple) else (output,)


def _equal(
    cut: CutModel, number: int, values: tuple[Tensor, ...], inputs: Mapping[str, Tensor], seen: list[Any]
) -> bool:
    """Return True if a block would get the same arguments as in the uncut model, in every leaf."""
    unit = cut_into_units(cut)[number + 1]
    known, shared = unit.split(number, values, inputs)
    leaves = pytree.tree_leaves(cut.trace(shared).calls[number].filled(known))
    return len(leaves) == len(seen) and all(map(_same, leaves, seen))


def _same(here: Any, there: Any) -> bool:
    if isinstance(here, Tensor) and isinstance(there, Tensor):
        return torch.equal(here, there)
    # Other objects, an empty cache for instance, are new in every run.
    return type(here) is type(there) and (not isinstance(here, bool | int | float | str) or here == there)


def _gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    if not logits.requires_grad:
        raise UncuttableError("gradients do not flow from the logits through the units: blocks make their own")
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(logits.float().square().mean(), list(weights.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(weights, found, strict=True) if gradient is not None}


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return float("inf")
    return float((one.detach().double() - other.detach().double()).abs().max()) if one.numel() else 0.0


def _run_alone(
    model: nn.Module, inputs: Mapping[str, Tensor], given: list[tuple[Tensor, ...]], count: int | None
) -> str | None:
    """Run one block after the other with all other weights removed, as on a worker that holds one unit.

    With a ``count``, run that many, alternating between the first and the last: these differ if any do.
    """
    blocks = range(len(given) - 2)
    for number in sorted(blocks, key=lambda number: min(number, len(blocks) - 1 - number))[:count]:
        alone = copy.deepcopy(model)
        cut = CutModel(alone, inputs)
        unit, values = cut_into_units(cut)[number + 1], given[number + 1]
        drop_weights(alone, {id(parameter) for parameter in unit.parameters()})
        try:
            found = _run_unit(unit, values, inputs)
        except Exception as error:
            return f"block {number} alone: {error}"
        if not all(map(torch.equal, found, given[number + 2])):
            return f"block {number} alone: other values"
    return None


def drop_weights(model: nn.Module, kept: set[int]) -> None:
    """Move all parameters to the meta device except those with these ids."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result for one model type."""

    kind: str
    type: str
    model: str  # class name
    outcome: Outcome
    reason: str = ""  # one line; why it is not exact
    blocks: int | None = None
    seconds: float = 0.0


def types_of(kind: str) -> dict[str, str]:
    """Return the model types of a kind that this transformers version has, with the class of each."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, KINDS[kind])
    return {name: made if isinstance(made, str) else made[0] for name, made in names.items()}


def verify(wanted: Sequence[tuple[str, str]], processes: int = PROCESSES) -> Iterator[Verified]:
    """Verify (kind, type) pairs in a few processes with one thread each; yield results as they complete."""
    # A fresh interpreter for each: this one may have threads, on which a forked process could hang.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_begin) as pool:
        resource_tracker.ensure_running()  # ahead, since it unblocks signals
        with signals_blocked():  # the processes start here
            waiting = [pool.submit(verify_type, kind, name) for kind, name in wanted]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command handles it
    unblock_signals()
    end_with_parent()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)  # transformers logs much about configs that are not used for training


def verify_type(kind: str, name: str) -> Verified:
    """Build the smallest model of a type and compare its units with it."""
    began, model = time.perf_counter(), types_of(kind)[name]
    outcome, reason, blocks = _outcome(kind, name)
    seconds = time.perf_counter() - began
    return Verified(kind=kind, type=name, model=model, outcome=outcome, reason=reason, blocks=blocks, seconds=seconds)


def _outcome(kind: str, name: str) -> tuple[Outcome, str, int | None]:
    """Return the outcome, its reason in one line, and the number of blocks."""
    if name in _NO_MODEL:
        return "not buildable", _NO_MODEL[name], None
    try:
        with _time_limit():
            model, inputs = build(kind, name)
            with torch.no_grad():
                call_model(model, inputs)
    except Exception as error:
        return "not buildable", _one_line(error), None
    try:
        with _time_limit():
            found = compare(model, inputs, alone=2)
    except (UncuttableError, SymbolicValueError) as error:
        return "refused", _one_line(error), None
    except Exception as error:
        return "refused", f"{type(error).__name__}: {_one_line(error)}", None
    if not found.is_exact:
        where = found.first_difference or f"logits by {found.logits:.1g}, gradients by {found.gradients:.1g}"
        return "different", where, found.blocks
    if found.needs_weights_elsewhere is not None:
        return "refused", found.needs_weights_elsewhere, found.blocks
    return "exact", "", found.blocks


def build(kind: str, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small model of a type with random weights, and a batch for it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class: Any = getattr(transformers, types_of(kind)[name])
    config = shrunken(CONFIG_MAPPING[name](**_DEFAULTS.get(name, {})))
    if not isinstance(config, model_class.config_class):  # text models use the text part of a larger config
        parts = [part for part in vars(config).values() if isinstance(part, model_class.config_class)]
        config = parts[0] if parts else config
    for part in (config, *vars(config).values()):
        if hasattr(part, "vocab_size") and getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = model_class(config).float().train(name in TRAINING)
    _stir(model)
    return model, batch(model, kind)


def _stir(model: nn.Module) -> None:
    """Perturb all weights a little, so that weights initialized to zero cannot hide an error."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def batch(model: Any, kind: str) -> dict[str, Tensor]:
    """Return images, or three texts: one padded on the right, one on the left, one not padded."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    if kind == "image" and takes(model, "pixel_values"):
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", None) or 64
        height, width = (size, size) if isinstance(size, int) else size
        shape = (2, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    last = min(ORDINARY_TOKENS.stop, getattr(config.get_text_config(), "vocab_size", None) or ORDINARY_TOKENS.stop)
    tokens = torch.randint(ORDINARY_TOKENS.start, last, (3, 12), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, 8:] = mask[1, :3] = 0
    end = getattr(config, "eos_token_id", None)
    if kind == "sequence" and isinstance(end, int):  # some classify the token at the end of the text
        tokens[0, 7] = tokens[1, 11] = tokens[2, 11] = end
    pad = getattr(config, "pad_token_id", None)
    tokens[mask == 0] = 0 if pad is None else pad
    return {"input_ids": tokens, "attention_mask": mask}


@contextmanager
def _time_limit() -> Iterator[None]:
    def ring(number: int, frame: Any) -> None:
        raise TimeoutError(f"takes longer than {LIMIT_S:g} s of processor time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if library := re.search(r"requires the (\S+) library", text):
        return f"needs the library {library[1]}"
    return text if len(text) <= 160 else f"{text[:157]}..."
