"""Options that tasks use: the sources of data and model, and the training options that have defaults per task.

Each is declared here only; ``thinpipe.train.settings`` adds the options of a run that no task needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thinpipe.options import above, below, between, options_of, pair
from thinpipe.train.tasks.panels import model_option, stage_option, task_default_option

HUB = "hub:"  # prefix of a data set's name
COUNT = between(1, 1_000_000_000)
Optimizer = Literal["sgd", "adamw"]
Dtype = Literal["float32", "bfloat16"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
LrSchedule = Literal["constant", "cosine", "linear"]


def _absolute_if_there(text: str) -> str:
    """Return the absolute path of text that exists or can only be a path; otherwise the text, a name of the hub."""
    path = Path(text)
    return str(path.resolve()) if path.exists() or text.startswith((".", "/", "~")) else text


def _changes(text: str) -> str:
    from thinpipe.train.tasks.sources import parse_changes  # imports this module

    parse_changes(text)
    return text


# Keyword arguments of options that name files: a path; a path or a name of the hub.
_FILES: dict[str, Any] = {"movable": True, "per_machine": True, "default": None}
_ON_DISK: dict[str, Any] = {
    "kind": Path,
    "parse": lambda path: path if str(path).startswith(HUB) else path.resolve(),
    **_FILES,
}
_NAMED: dict[str, Any] = {"parse": _absolute_if_there, **_FILES}


@dataclass(frozen=True, kw_only=True)
class Source:
    """The origin and size of data and weights; None means the task's default."""

    data: Path | None = model_option(
        "Data on disk; for lm also a data set of the hub, as in hub:org/name.",
        metavar="PATH",
        default_text="built in or downloaded",
        **_ON_DISK,
    )
    validation: Path | None = model_option(
        "Validation data, in the form of {data}.",
        metavar="PATH",
        default_text="held out from {data}",
        advanced=True,
        **_ON_DISK,
    )
    model: str | None = model_option(
        "Pretrained model: a folder of transformers, a name of the hub, or package.module:function.",
        metavar="NAME",
        **_NAMED,
    )
    config: str | None = model_option(
        "Model with random weights: a folder with config.json, a name of the hub, or a model type, as in llama.",
        metavar="NAME",
        **_NAMED,
    )
    config_set: str | None = model_option(
        "Values of {config} to override, as in hidden_size=256,num_hidden_layers=4.",
        metavar="NAME=X,...",
        parse=_changes,
        advanced=True,
        default=None,
    )
    tokenizer: str | None = model_option(
        "Tokenizer: a folder or a name of the hub.",
        metavar="NAME",
        default_text="the model's; trained on the data",
        advanced=True,
        **_NAMED,
    )
    vocabulary: int | None = model_option(
        "Vocabulary size of a tokenizer that is trained on the data.",
        metavar="N",
        default_text="8192",
        rule=between(257, 10_000_000),  # all bytes, and an end-of-text token
        advanced=True,
        default=None,
    )
    chat_template: Path | None = model_option(
        "File with a Jinja chat template.", metavar="FILE", default_text="the tokenizer's", advanced=True, **_ON_DISK
    )
    dtype: Dtype = model_option(
        "Type of a {model}'s weights, activations and gradients; optimizer: float32.", default="float32"
    )
    attention: Attention | None = model_option(
        "Attention of a {model}: sdpa, eager, or flash_attention_2, which needs flash_attn, a GPU and bfloat16.",
        metavar="NAME",
        kind=Attention,
        default_text="transformers' choice",
        movable=True,
        advanced=True,
        default=None,
    )
    trust_remote_code: bool = model_option("Run Python code that comes with the model.", advanced=True, default=False)
    weights: Path | None = model_option("Pretrained weights on disk.", metavar="PATH", advanced=True, **_ON_DISK)
    pretrained: bool = model_option(  # False: random weights even if the task starts from a checkpoint
        "Start from pretrained or from random weights.", negative=True, advanced=True, default=True
    )
    image_size: int | None = model_option(
        "Width and height of images.",
        metavar="PIXELS",
        default_text="the model's or the task's",
        rule=between(1, 1_000_000),
        advanced=True,
        default=None,
    )
    tokens: int | None = model_option(
        "Tokens per text.", metavar="N", default_text="the task's", rule=between(1, 1_000_000), default=None
    )
    width: float | None = model_option(
        "Width multiplier of the task's model.", metavar="X", rule=above(0, 1e6), advanced=True, default=None
    )
    packing: bool = model_option(
        "Several conversations or documents per sample; attention does not cross them.",
        advanced=True,
        negative=True,
        default_value=None,
        default_text="the task's",
        default=False,
    )
    samples: int | None = model_option(
        "Use at most N training samples.", metavar="N", default_text="all", rule=between(1, 1 << 62), default=None
    )

    def __post_init__(self) -> None:
        for name, declared in options_of(Source).items():
            if declared.kind is Path and isinstance(value := getattr(self, name), str):  # from JSON or a plan
                object.__setattr__(self, name, Path(value))


@dataclass(frozen=True, kw_only=True)
class TaskDefaults:
    """The training options that have defaults per task. A task's instance holds its defaults, ``Settings`` the values.

    The defaults below are those of tasks that do not set the option.
    """

    packing: bool = False  # of tasks with texts: the default of Source's option
    batch_size: int = task_default_option(
        "Samples per batch, over all replicas.", metavar="N", rule=COUNT, evaluates=True, kept="always"
    )
    chunks: int = stage_option(  # of each worker's batch
        "Microbatches per batch.",
        aliases=("microbatches",),
        metavar="N",
        default_text="the task's; 1 without a pipeline",
        rule=between(1, 1_000_000),
        evaluates=True,
        kept="same parallel",
        at_end=True,
    )
    epochs: int = task_default_option("Passes over the training data.", metavar="N", rule=COUNT)
    optimizer: Optimizer = task_default_option("SGD with momentum, or AdamW.", advanced=True)
    lr: float = task_default_option("Peak learning rate.", metavar="X", rule=above(0, 1e6), aliases=("learning_rate",))
    lr_schedule: LrSchedule = task_default_option(
        "After the warm-up: constant, or decay to 0, linear or along a cosine.",
        metavar="NAME",
        kind=Literal["constant", "cosine", "linear", "polynomial"],
        synonyms={"polynomial": "linear"},  # its name up to version 0.2
        advanced=True,
    )
    warmup: float = task_default_option(
        "Fraction of all steps with linear warm-up.", metavar="X", rule=below(1), advanced=True, default=0.0
    )
    momentum: float = task_default_option("Momentum of SGD.", metavar="X", rule=below(1), advanced=True, default=0.9)
    weight_decay: float = task_default_option(
        "Weight decay coefficient.", metavar="X", rule=between(0, 1000), advanced=True, default=0.0
    )
    clip_norm: float | None = task_default_option(
        "Clip gradients to this norm, over all stages.", metavar="X", rule=above(0, 1e30), advanced=True, default=None
    )
    # None: cut so that the work is balanced; or the layout is linear.
    client_layers: tuple[int, int] | None = stage_option(
        "Units in the client's first and last stage, as in 1,1.",
        metavar="A,B",
        default_text="the task's",
        parse=pair("client_layers", int, "1,1"),
        movable=True,
        evaluates=True,
        kept="same parallel",
        advanced=True,
        default=(1, 1),
    )
