"""The options of `thinpipe generate`; those that training has too are declared there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from thinpipe.codecs.recipes import directions
from thinpipe.comm.membership import PATIENCE_S, member
from thinpipe.links.registry import link_codec
from thinpipe.options import OptionError, above, between, check, like, option, options_of
from thinpipe.train.checkpoints.folder import check_exported
from thinpipe.train.models.pretrained import PretrainedModel
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.models.weights import LoadWeights
from thinpipe.train.running import RunOptions, check_devices
from thinpipe.train.settings import Settings
from thinpipe.train.shaping import Shaping
from thinpipe.train.tasks.options import Source
from thinpipe.train.tasks.panels import LINKS, MACHINES, OUT, WHERE, link_option, stage_option
from thinpipe.train.tasks.sources import chosen_model

WHAT, CHOICE = "Model and prompts", "Sampling"
PROMPT = "prompt"  # drafts from earlier text
PANELS = WHAT, CHOICE, WHERE, LINKS, OUT, MACHINES  # of the help, in this order


def _activations(text: str) -> str:
    """Return the codec spec of activations, the only tensors that travel."""
    spec = directions(text)[0]
    stateless = link_codec(spec).stateless_codec
    if stateless is None:
        raise OptionError(
            f"{spec} learns from what is sent again and again, and texts are generated once: give {{compress}} a "
            f"codec that learns nothing, as in 4bit or gauss:3; got {text}"
        )
    return stateless.spec


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """The settings that all workers of a run start with."""

    model: str = like(
        Settings, "model", help="Causal language model: a folder of transformers, or a name of the hub.", panel=WHAT
    )
    adapter: str | None = option(
        "LoRA adapters: a folder of peft, as {export} writes it. Also sets {model}, unless that is given.",
        panel=WHAT,
        metavar="DIR",
        kind=Path,
        parse=lambda path: str(path.resolve()),
        default_text="none",
        per_machine=True,
        default=None,
    )
    tokenizer: str | None = like(
        Settings, "tokenizer", default_text="the adapter's or the model's", panel=WHAT, default=None
    )
    trust_remote_code: bool = like(Settings, "trust_remote_code", panel=WHAT, default=False)
    max_new_tokens: int = option(
        "Maximum number of new tokens per prompt.", panel=WHAT, metavar="N", rule=between(1, 1_000_000), default=64
    )
    batch_size: int | None = option(
        "Prompts per batch.", panel=WHAT, metavar="N", default_text="all", rule=between(1, 1_000_000), default=None
    )
    chat: bool = option(
        "Put each prompt into the tokenizer's chat template, as a user's message.", panel=WHAT, default=False
    )
    temperature: float | None = option(
        "Sampling temperature.",
        panel=CHOICE,
        metavar="X",
        default_text="greedy decoding",
        rule=above(0, 1000),
        default=None,
    )
    top_k: int | None = option(
        "Sample from the N most likely tokens.",
        panel=CHOICE,
        metavar="N",
        default_text="all",
        rule=between(1, 1_000_000_000),
        default=None,
    )
    top_p: float | None = option(
        "Sample from the most likely tokens whose probabilities add up to X.",
        panel=CHOICE,
        metavar="X",
        default_text="all",
        rule=above(0, 1),
        default=None,
    )
    seed: int = like(Settings, "seed", help="Seed of sampling and of stochastic rounding.", panel=CHOICE, default=0)
    draft: str | None = option(
        "Draft several tokens per trip around the ring: prompt (copies earlier text), or a small causal model with the "
        "same tokenizer.",
        panel=CHOICE,
        metavar="NAME",
        default_text="no drafts",
        parse=options_of(Settings)["model"].parse,
        per_machine=True,
        default=None,
    )
    draft_tokens: int = option(
        "Drafted tokens per trip.", panel=CHOICE, metavar="N", rule=between(1, 256), default=8, per_machine=True
    )
    parallel: Literal["pipeline", "none"] = stage_option(
        "Stages of the model on several workers, or one process.", default="pipeline"
    )
    workers: int | None = like(Settings, "workers", default=None)
    client_layers: tuple[int, int] | None = like(Settings, "client_layers", default_text=None, default=(1, 1))
    device: str | None = like(Settings, "device", per_machine=True, default=None)
    threads: int | None = like(Settings, "threads", default=None)
    compress: str = link_option(
        "Codec of hidden states, or a preset, as in 8bit or 4bit.", metavar="SPEC", parse=_activations, default="none"
    )
    compare: bool = link_option(
        "Generate without compression too, and report the first differing token.", default=False
    )
    link: Shaping | None = like(RunOptions, "link", default=None)
    patience_s: float = like(RunOptions, "patience_s", default=PATIENCE_S)

    def __post_init__(self) -> None:
        check(self)
        _activations(self.compress)
        if self.temperature is None and (self.top_k is not None or self.top_p is not None):
            raise OptionError("{top_k} and {top_p} are for sampling: give a {temperature} too, as in 1")
        if self.parallel == "none":
            if self.compress != "none" or self.compare or self.link is not None:
                raise OptionError(
                    "{compress}, {compare} and {link} are about what travels, and {parallel} none is one process: "
                    "leave them out"
                )
            if self.workers not in (None, 1):
                raise OptionError(f"{{parallel}} none is one worker, got {self.workers}; leave out {{workers}}")
        elif self.count < 2:
            raise OptionError(
                f"a pipeline has 2 workers or more, got {self.count}; {{parallel}} none generates in one process"
            )
        if self.compare and self.compress == "none":
            raise OptionError("{compare} holds a codec against none: name one with {compress}, as in 4bit")
        if len(self.devices) > self.count:
            raise OptionError(f"{{device}} {self.device} names more than the {self.count} workers there are")

    @property
    def count(self) -> int:
        """The number of workers."""
        me = member()
        return self.workers or (1 if self.parallel == "none" else 2 if me is None else me.size)

    @property
    def devices(self) -> list[str]:
        """The device of every worker."""
        named = (self.device or ("cuda" if torch.cuda.is_available() else "cpu")).split(",")
        return named + named[-1:] * (self.count - len(named))

    @staticmethod
    def resolve(given: dict[str, Any]) -> GenerationSettings:
        """Return the settings of the given options; of an adapter with its model, unless another is given."""
        if "adapter" in given:
            check_exported(given["adapter"], "adapter")
            given = SavedAdapter(Path(given["adapter"])).completed(given)
        if "model" not in given:
            raise OptionError("which model? Name a folder of transformers with {model}")
        settings = GenerationSettings(**given)
        check_devices(settings.devices)
        check_exported(settings.model)
        return settings

    def check_model(self) -> None:
        """Raise ValueError unless the weights are there and the adapter fits the model; called on the client."""
        self.pretrained.check_weights()
        if self.adapter is not None:
            self.built()
        if (draft := self.draft_model) is not None:
            draft.check_weights()
            if not draft.has_tokenizer or draft.tokenizer().get_vocab() != self.pretrained.tokenizer().get_vocab():
                raise OptionError(f"{{draft}} {self.draft} has not the tokenizer of {self.pretrained.name}")

    @property
    def source(self) -> Source:
        return Source(model=self.model, tokenizer=self.tokenizer, trust_remote_code=self.trust_remote_code)

    @cached_property
    def pretrained(self) -> PretrainedModel:
        """The model, not yet read."""
        found = chosen_model(self.source, "causal")
        if not isinstance(found, PretrainedModel):
            raise OptionError(
                f"texts come from a model of transformers: {{model}} is a folder or a name of the hub; got {self.model}"
            )
        return found

    @cached_property
    def draft_model(self) -> PretrainedModel | None:
        """The model that drafts, not yet read; None: no drafts, or drafts from the prompt."""
        if self.draft in (None, PROMPT):
            return None
        found = chosen_model(Source(model=self.draft, trust_remote_code=self.trust_remote_code), "causal")
        if not isinstance(found, PretrainedModel):
            raise OptionError(f"{{draft}} is {PROMPT}, or a folder or a name of the hub; got {self.draft}")
        return found

    @property
    def saved_adapter(self) -> SavedAdapter | None:
        return None if self.adapter is None else SavedAdapter(Path(self.adapter))

    def built(self) -> tuple[nn.Module, LoadWeights]:
        """Return the model with its adapters, on the meta device, and the function that loads its parameters.

        Raises ValueError if the adapters are not the model's.
        """
        model, load = self.pretrained.init_on_meta(), self.pretrained.weight_loader(pretrained=True, seed=0)
        if self.saved_adapter is None:
            return model.eval(), load
        both = self.saved_adapter.put_on(model).loader(load)
        assert both is not None
        return model.eval(), both
