"""What is trained: the options of `thinpipe train` that name a task, its data and its model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from thinpipe.models.adapters import MOST_RANK, Lora
from thinpipe.options import OptionError, above, below, between, option
from thinpipe.workloads.sources import HUB, parse_changes
from thinpipe.workloads.task import Dtype, Source
from thinpipe.workloads.tasks import TASKS

WHAT = "What is trained"  # the panel of the help


def _absolute(path: Path) -> str:
    return str(path) if str(path).startswith(HUB) else str(path.resolve())


def _place(text: str) -> str:
    """What is on this machine by its full path; else it is a name."""
    path = Path(text)
    return str(path.resolve()) if path.exists() or text.startswith((".", "/", "~")) else text


def _changes(text: str) -> str:
    parse_changes(text)
    return text


_ON_DISK: dict[str, Any] = {"kind": Path, "parse": _absolute, "movable": True, "default": None}
_NAMED: dict[str, Any] = {"parse": _place, "movable": True, "default": None, "panel": WHAT}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Task, data and model: the part of the settings that a task is asked with."""

    task: str = option(f"One of {', '.join(TASKS)}.", panel=WHAT, metavar="NAME", usual="digits")
    data: str | None = option(
        "Data on disk; texts for lm also as hub:org/name.",
        panel=WHAT,
        metavar="PATH",
        shown="embedded or downloaded",
        **_ON_DISK,
    )
    model: str | None = option(
        "Your model: a folder of transformers, a name of the hub, or package.module:function.",
        metavar="NAME",
        **_NAMED,
    )
    config: str | None = option(
        "Your model from scratch: a folder with config.json, a name of the hub, or a model type, as in llama.",
        metavar="NAME",
        **_NAMED,
    )
    config_set: str | None = option(
        "What {config} says otherwise, as in hidden_size=256,num_hidden_layers=4.",
        panel=WHAT,
        metavar="NAME=X,...",
        parse=_changes,
        default=None,
    )
    tokenizer: str | None = option(
        "A folder or a name of the hub.", metavar="NAME", shown="the model's; trained on the data", **_NAMED
    )
    vocabulary: int | None = option(
        "Tokens of a tokenizer that is trained.",
        panel=WHAT,
        metavar="N",
        shown="8192",
        rule=between(257, 10_000_000),  # all bytes, and the end of a text
        default=None,
    )
    chat_template: str | None = option(
        "In place of the tokenizer's.", panel=WHAT, metavar="FILE", shown="the tokenizer's", **_ON_DISK
    )
    dtype: Dtype = option(
        "Of a {model}'s weights, activations and gradients; the optimizer's are float32.", panel=WHAT, default="float32"
    )
    trust_remote_code: bool = option("Run code that comes with a model.", panel=WHAT, default=False)
    weights: str | None = option("Weights on disk to start from.", panel=WHAT, metavar="PATH", **_ON_DISK)
    pretrained: bool = option("Start from weights, or at random.", panel=WHAT, negative=True, usual=True)
    image_size: int | None = option(
        "Width and height of images.", panel=WHAT, metavar="PIXELS", rule=between(1, 1_000_000), default=None
    )
    tokens: int | None = option("Length of texts.", panel=WHAT, metavar="N", rule=between(1, 1_000_000), default=None)
    width: float | None = option(
        "Factor on the model's width.", panel=WHAT, metavar="X", rule=above(0, 1e6), default=None
    )
    samples: int | None = option(
        "Train on so many at most, for a quick look.",
        panel=WHAT,
        metavar="N",
        shown="all",
        rule=between(1, 1 << 62),
        default=None,
    )

    lora: int | None = option(
        "Train adapters of this rank on the blocks, and a classifier's head; all else is frozen.",
        panel=WHAT,
        metavar="RANK",
        shown="train everything",
        rule=between(1, MOST_RANK),
        default=None,
    )
    lora_target: str | None = option(
        "Layers in the blocks, as in q_proj,v_proj; all-linear.",
        panel=WHAT,
        metavar="NAME,...",
        shown="the architecture's",
        default=None,
    )
    lora_alpha: float | None = option(
        "Adapters count X / RANK.", panel=WHAT, metavar="X", shown="twice the rank", rule=above(0, 1e6), default=None
    )
    lora_dropout: float = option("Of what adapters are given.", panel=WHAT, metavar="X", rule=below(1), default=0.0)
    freeze: tuple[str, ...] = option(
        "Parameters that are not trained, as in '*.embed_tokens.*'; may be repeated.",
        panel=WHAT,
        metavar="PATTERN",
        kind=list[str],
        parse=lambda patterns: tuple(patterns) or None,
        shown="none",
        default=(),
    )

    def check_source(self) -> None:
        """OptionError for names that contradict each other."""
        more = {"lora_target": self.lora_target, "lora_alpha": self.lora_alpha, "lora_dropout": self.lora_dropout}
        given = [name for name, value in more.items() if value]
        if given and self.lora is None:
            raise OptionError(
                f"{{{given[0]}}} says more about adapters: give their rank with {{lora}}, as in {{lora}} 8"
            )
        if self.model is not None and self.config is not None:
            raise OptionError(
                "{model} starts from a model's weights, {config} from its description alone: give one of them"
            )
        if self.config_set is not None and self.config is None:
            raise OptionError("{config_set} changes what {config} says: name a model type or a folder with {config}")

    def check_export(self, *, merge: bool) -> None:
        """OptionError if what is exported could not be used, or is not there."""
        if merge and self.lora is None:
            raise OptionError(
                "{merge} adds adapters to a model's weights, and without {lora} there are none: leave it out"
            )
        if self.lora is not None and not merge and (self.model is None or not self.pretrained):
            raise OptionError(
                "adapters belong to the weights of a {model}, and here there are none that could be loaded again: "
                "give {merge}, which exports both"
            )

    @property
    def adapters(self) -> Lora | None:
        if self.lora is None:
            return None
        targets = tuple(name.strip() for name in (self.lora_target or "").split(",") if name.strip())
        return Lora(rank=self.lora, targets=targets, alpha=self.lora_alpha, dropout=self.lora_dropout)

    @property
    def source(self) -> Source:
        """Where data and weights come from, for the task."""
        given = {each.name: getattr(self, each.name) for each in fields(Source)}
        paths = {name: Path(given[name]) for name in ("data", "weights", "chat_template") if given[name] is not None}
        return Source(**given | paths)
