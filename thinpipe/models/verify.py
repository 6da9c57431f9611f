"""Every model type of transformers, built small and cut: which ones compute, in units, exactly what they do whole."""

from __future__ import annotations

import logging
import re
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinpipe.models.blocks import UncuttableError
from thinpipe.models.compare import compare
from thinpipe.models.forward import call_model, takes
from thinpipe.models.tiny import WORDS, shrunken
from thinpipe.models.unknown import UnknownValueError
from thinpipe.workers.signals import end_with_parent, signals_blocked, unblock_signals

Outcome = Literal["exact", "different", "refused", "not buildable"]
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
LIMIT_S = 40.0  # of processor time for one type, most of which take one second
PROCESSES = 2

_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
# Model type -> what its default configuration lacks, without which no model can be built, or no interesting one.
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
# Model type -> why there is no model of it to verify, where its error does not say so.
_NO_MODEL = {
    "gemma4_assistant": "drafts for another model, whose keys and values it is given",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it is given",
    "musicgen": "its tokens are codes of sound, several rows a sample",
    "musicgen_melody": "its tokens are codes of sound, several rows a sample",
    "pp_lcnet": "returns no logits",
    "shieldgemma2": "takes a text beside the image",
    "siglip2": "takes patches of images, not images",
}
TRAINING = ("levit", "reformer")  # keep results between runs unless they are in training mode


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What became of one model type."""

    kind: str
    type: str
    model: str  # the class
    outcome: Outcome
    reason: str = ""  # why it is not exact, in one line
    blocks: int | None = None
    seconds: float = 0.0


def types_of(kind: str) -> dict[str, str]:
    """The model types of a kind that this transformers knows, with the class of each."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, KINDS[kind])
    return {name: made if isinstance(made, str) else made[0] for name, made in names.items()}


def verify(wanted: Sequence[tuple[str, str]], processes: int = PROCESSES) -> Iterator[Verified]:
    """Verify (kind, type) one after the other in a few processes, each with one thread; yields as they are done."""
    # A fresh interpreter for each: this one may have threads, which a forked process would wait for.
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command has words for it
    unblock_signals()
    end_with_parent()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)  # transformers says much about configurations that nobody trains


def verify_type(kind: str, name: str) -> Verified:
    """Build the smallest model of a type and hold its units against it."""
    began, model_class = time.perf_counter(), types_of(kind)[name]

    def verified(outcome: Outcome, reason: str = "", blocks: int | None = None) -> Verified:
        seconds = time.perf_counter() - began
        return Verified(
            kind=kind, type=name, model=model_class, outcome=outcome, reason=reason, blocks=blocks, seconds=seconds
        )

    if name in _NO_MODEL:
        return verified("not buildable", _NO_MODEL[name])
    try:
        with _time_limit():
            model, inputs = build(kind, name)
            with torch.no_grad():
                call_model(model, inputs)
    except Exception as error:
        return verified("not buildable", _one_line(error))
    try:
        with _time_limit():
            found = compare(model, inputs, alone=2)
    except (UncuttableError, UnknownValueError) as error:
        return verified("refused", _one_line(error))
    except Exception as error:
        return verified("refused", f"{type(error).__name__}: {_one_line(error)}")
    if not found.is_exact:
        where = found.first_difference or f"logits by {found.logits:.1g}, gradients by {found.gradients:.1g}"
        return verified("different", where, found.blocks)
    if found.needs_weights_elsewhere is not None:
        return verified("refused", found.needs_weights_elsewhere, found.blocks)
    return verified("exact", "", found.blocks)


def build(kind: str, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of a type with random weights, and a batch for it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class: Any = getattr(transformers, types_of(kind)[name])
    config = shrunken(CONFIG_MAPPING[name](**_DEFAULTS.get(name, {})))
    if not isinstance(config, model_class.config_class):  # a model of text has the text part of a larger configuration
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
    """Change all weights a little: parts that begin at zero, and would hide a mistake, count too."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def batch(model: Any, kind: str) -> dict[str, Tensor]:
    """Images, or three texts: one padded on the right, one on the left, one whole."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    if kind == "image" and takes(model, "pixel_values"):
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", None) or 64
        height, width = (size, size) if isinstance(size, int) else size
        shape = (2, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    last = min(WORDS.stop, getattr(config.get_text_config(), "vocab_size", None) or WORDS.stop)
    tokens = torch.randint(WORDS.start, last, (3, 12), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, 8:] = mask[1, :3] = 0
    end = getattr(config, "eos_token_id", None)
    if kind == "sequence" and isinstance(end, int):  # some classify what stands at the end of the text
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
