"""Settings that define a run and are stored in its checkpoints; options of one execution are in running.py.

Every option of `thinpipe train` that defines a run is declared here, once; see thinpipe/options.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from thinpipe.codecs.spec import codec
from thinpipe.links.registry import check_directions
from thinpipe.options import OptionError, Rule, above, below, between, check, from_facts, option, options_of, pair
from thinpipe.pipeline.order import ORDERS, Order, is_order
from thinpipe.pipeline.partition import Layout
from thinpipe.train.events import Parallel
from thinpipe.train.models.adapters import MOST_RANK, Lora
from thinpipe.train.paths import NAMED, ON_DISK
from thinpipe.train.tasks.sources import parse_changes
from thinpipe.train.tasks.task import Dtype, LrSchedule, Optimizer, Source
from thinpipe.train.tasks.tasks import TASKS

PANELS = WHAT, _WHERE, LINKS, HOW, OUT, SAVE, MACHINES = (  # of the help, in this order
    "Task, data and model",
    "Workers and stages",
    "Links and compression",
    "Training",
    "Output",
    "Checkpoints and export",
    "Several machines, and failures",
)
COUNT = between(1, 1_000_000_000)


def _changes(text: str) -> str:
    parse_changes(text)
    return text


_ON_DISK, _NAMED = {**ON_DISK, "panel": WHAT}, {**NAMED, "panel": WHAT}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Task, data and model: the part of the settings that a task needs."""

    task: str = option(
        f"One of {', '.join(TASKS)}; or your own, package.module:Class.",
        panel=WHAT,
        metavar="NAME",
        usual="digits",
        shown="digits; lm with a {model}",
    )
    data: str | None = option(
        "Data on disk; for lm also a data set of the hub, as in hub:org/name.",
        metavar="PATH",
        shown="built in or downloaded",
        **_ON_DISK,
    )
    validation: str | None = option(
        "Validation data, in the form of {data}.", metavar="PATH", shown="held out from {data}", **_ON_DISK
    )
    model: str | None = option(
        "Pretrained model: a folder of transformers, a name of the hub, or package.module:function.",
        metavar="NAME",
        **_NAMED,
    )
    config: str | None = option(
        "Model with random weights: a folder with config.json, a name of the hub, or a model type, as in llama.",
        metavar="NAME",
        **_NAMED,
    )
    config_set: str | None = option(
        "Values of {config} to override, as in hidden_size=256,num_hidden_layers=4.",
        panel=WHAT,
        metavar="NAME=X,...",
        parse=_changes,
        default=None,
    )
    tokenizer: str | None = option(
        "Tokenizer: a folder or a name of the hub.", metavar="NAME", shown="the model's; trained on the data", **_NAMED
    )
    vocabulary: int | None = option(
        "Vocabulary size of a tokenizer that is trained on the data.",
        panel=WHAT,
        metavar="N",
        shown="8192",
        rule=between(257, 10_000_000),  # all bytes, and an end-of-text token
        default=None,
    )
    chat_template: str | None = option(
        "File with a Jinja chat template.", metavar="FILE", shown="the tokenizer's", **_ON_DISK
    )
    dtype: Dtype = option(
        "Type of a {model}'s weights, activations and gradients; optimizer: float32.", panel=WHAT, default="float32"
    )
    trust_remote_code: bool = option("Run Python code that comes with the model.", panel=WHAT, default=False)
    weights: str | None = option("Pretrained weights on disk.", metavar="PATH", **_ON_DISK)
    pretrained: bool = option("Start from pretrained or from random weights.", panel=WHAT, negative=True, usual=True)
    image_size: int | None = option(
        "Width and height of images.", panel=WHAT, metavar="PIXELS", rule=between(1, 1_000_000), default=None
    )
    tokens: int | None = option("Tokens per text.", panel=WHAT, metavar="N", rule=between(1, 1_000_000), default=None)
    width: float | None = option(
        "Width multiplier of the task's model.", panel=WHAT, metavar="X", rule=above(0, 1e6), default=None
    )
    samples: int | None = option(
        "Use at most N training samples.", panel=WHAT, metavar="N", shown="all", rule=between(1, 1 << 62), default=None
    )

    lora: int | None = option(
        "Train LoRA adapters of this rank on the blocks, and a classifier's head; freeze all other weights.",
        panel=WHAT,
        metavar="RANK",
        shown="train all weights",
        rule=between(1, MOST_RANK),
        default=None,
    )
    lora_target: str | None = option(
        "Layers of the blocks with adapters, as in q_proj,v_proj, or all-linear.",
        panel=WHAT,
        metavar="NAME,...",
        shown="the architecture's",
        default=None,
    )
    lora_alpha: float | None = option(
        "LoRA scaling is X / rank.", panel=WHAT, metavar="X", shown="twice the rank", rule=above(0, 1e6), default=None
    )
    lora_dropout: float = option("Dropout of adapters.", panel=WHAT, metavar="X", rule=below(1), default=0.0)
    freeze: tuple[str, ...] = option(
        "Freeze the parameters that match a pattern, as in '*.embed_tokens.*'; repeatable.",
        panel=WHAT,
        metavar="PATTERN",
        kind=list[str],
        parse=lambda patterns: tuple(patterns) or None,
        shown="none",
        default=(),
    )

    def check_source(self) -> None:
        """Raise OptionError for options that contradict each other."""
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
        """Raise OptionError if the exported model would be unusable, or there would be nothing to export."""
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
        """The sources of data and weights, for the task."""
        given = {each.name: getattr(self, each.name) for each in fields(Source)}
        on_disk = ("data", "validation", "weights", "chat_template")
        return Source(**given | {name: Path(given[name]) for name in on_disk if given[name] is not None})


@dataclass(frozen=True, kw_only=True)
class Settings(Trained):
    """All settings that the result of a run depends on.

    Settings with a default are missing in checkpoints of older versions, which behaved as the default specifies.
    ``movable`` marks settings that may change when a run resumes: the placement of computations, and the location of
    data and weights. A value above a setting's maximum can only be a mistake, and some would end the process without an
    error message: OpenMP aborts if it cannot start its threads, torch raises if a factor exceeds the range of float32.
    """

    parallel: Parallel = option(
        "Stages of the model on several workers, replicas of the model, or one process.", panel=_WHERE, usual="pipeline"
    )
    workers: int = option(
        "Workers to start; with {rank}, workers on all machines. Under torchrun: leave it out.",
        panel=_WHERE,
        metavar="N",
        shown="2",
        rule=between(1, 4096),
        movable=True,
    )
    layout: Layout = option(
        "Worker 0, the client, has the first and the last stage, or the first stage only.",
        panel=_WHERE,
        kind=Literal["client-server", "linear"],
        usual="client-server",
        movable=True,
    )
    # None: cut so that the work is balanced; or the layout is linear.
    client_layers: tuple[int, int] | None = option(
        "Units in the client's first and last stage, as in 1,1.",
        panel=_WHERE,
        metavar="A,B",
        parse=pair("client_layers", int, "1,1"),
        movable=True,
    )
    schedule: Order = option(
        "gpipe runs all forwards, then all backwards; 1f1b runs backwards as early as possible, with as many "
        "microbatches in flight as the delay of {link} needs; 1f1b:N with N in flight.",
        panel=_WHERE,
        metavar="NAME",
        rule=Rule(ORDERS, is_order),
        usual="gpipe",
    )
    chunks: int = option(  # of each worker's batch
        "Microbatches per batch.",
        panel=_WHERE,
        aliases=("microbatches",),
        metavar="N",
        shown="the task's; 1 without a pipeline",
        rule=between(1, 1_000_000),
    )
    compress_forward: str = option(
        "Codec of activations; axes:B learns a basis, delta(SPEC) sends changes since the last epoch.",
        panel=LINKS,
        metavar="SPEC",
        shown="as {compress}",
    )
    compress_backward: str = option("Codec of gradients.", panel=LINKS, metavar="SPEC", shown="as {compress}")
    batch_size: int = option("Samples per batch, over all replicas.", panel=HOW, metavar="N", rule=COUNT)
    accumulate: int = option(
        "Batches per update; their gradients are accumulated.",
        panel=HOW,
        metavar="N",
        rule=COUNT,
        aliases=("gradient_accumulation_steps",),
        default=1,
    )
    epochs: int = option("Passes over the training data.", panel=HOW, metavar="N", rule=COUNT)
    optimizer: Optimizer = option("SGD with momentum, or AdamW.", panel=HOW)
    lr: float = option("Peak learning rate.", panel=HOW, metavar="X", rule=above(0, 1e6), aliases=("learning_rate",))
    lr_schedule: LrSchedule = option(
        "After the warm-up: constant, or decay to 0, linear or along a cosine.",
        panel=HOW,
        metavar="NAME",
        kind=Literal["constant", "cosine", "linear", "polynomial"],
        synonyms={"polynomial": "linear"},  # its name up to version 0.2, as RoBERTa's recipe has it
    )
    warmup: float = option("Fraction of all steps with linear warm-up.", panel=HOW, metavar="X", rule=below(1))
    momentum: float = option("Momentum of SGD.", panel=HOW, metavar="X", rule=below(1))
    nesterov: bool = option("Nesterov momentum for SGD.", panel=HOW, default=False)
    adam_betas: tuple[float, float] = option(
        "Decay rates of AdamW's first and second moments, as in 0.9,0.95.",
        panel=HOW,
        metavar="A,B",
        parse=pair("adam_betas", float, "0.9,0.95"),
        rule=Rule("two numbers from 0 to below 1", lambda betas: len(betas) == 2 and all(0 <= b < 1 for b in betas)),
        default=(0.9, 0.999),
    )
    weight_decay: float = option("Weight decay coefficient.", panel=HOW, metavar="X", rule=between(0, 1000))
    clip_norm: float | None = option(
        "Clip gradients to this norm, over all stages.",
        panel=HOW,
        metavar="X",
        rule=above(0, 1e30),
        default=None,
    )
    amp: bool = option("Compute in bfloat16 where that is safe (autocast).", panel=HOW, default=False)
    recompute: bool = option(
        "Recompute activations in the backward pass to save memory.",
        panel=_WHERE,
        aliases=("gradient_checkpointing",),
        default=False,
    )
    seed: int = option(
        "Seed of weights, data and dropout.", panel=HOW, metavar="N", usual=0, rule=below(2**32, words="2^32")
    )
    device: str = option(
        "Device of the workers: cpu, cuda, or cpu,cuda for a client without a GPU.",
        panel=_WHERE,
        metavar="NAME",
        parse=lambda text: None if text == "auto" else text,
        shown="auto: cuda if there is one",
        rule=Rule(
            "auto, cpu, cuda, or a list of the last two: the first is the client's, the last for all that follow",
            lambda text: all(name in ("cpu", "cuda") for name in text.split(",")),
        ),
        movable=True,
    )
    threads: int | None = option(  # None: set by the environment
        "Threads per worker.",
        panel=_WHERE,
        metavar="N",
        shown="cores / workers",
        rule=between(1, 1024),
        movable=True,
        per_machine=True,
        default=None,
    )
    error_feedback: bool = option(
        "Replicas add the compression error of a gradient to the next one.", panel=LINKS, negative=True, default=True
    )

    def __post_init__(self) -> None:
        # Their ValueError names the problem.
        check_directions(self.compress_forward, self.compress_backward)
        if self.parallel != "pipeline":
            codec(self.compress_forward)
        check(self)
        self.check_source()
        if self.parallel == "pipeline" and self.workers < 2:
            raise OptionError(
                f"a pipeline has 2 workers or more, got {self.workers}; {{parallel}} none trains in one process"
            )
        if self.parallel == "none" and self.workers != 1:
            raise OptionError(f"{{parallel}} none is one worker, got {self.workers}; leave out {{workers}}")
        if self.parallel == "data" and self.compress_forward != self.compress_backward:
            raise OptionError(
                "replicas exchange gradients only: give {parallel} data one codec with {compress}, "
                f"not {self.compress_forward} forward and {self.compress_backward} backward"
            )
        if self.parallel != "data" and not self.error_feedback:
            raise OptionError(
                "error feedback is for the gradients that replicas exchange: leave out {no_error_feedback}, or give "
                f"{{parallel}} data instead of {self.parallel}"
            )
        if self.amp and self.dtype != "float32":
            raise OptionError(
                f"{{amp}} computes in bfloat16 with float32 weights, {{dtype}} {self.dtype} has the weights in it too: "
                "give one of them"
            )
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise OptionError(
                "{nesterov} looks ahead along SGD's momentum: give {optimizer} sgd and a {momentum} above 0"
            )
        if self.adam_betas != type(self).adam_betas and self.optimizer != "adamw":
            raise OptionError(
                f"{{adam_betas}} are decay rates of AdamW's running means, and {{optimizer}} {self.optimizer} has "
                "none: leave them out, or give {optimizer} adamw"
            )
        if self.device.count(",") >= self.workers:
            raise OptionError(f"{{device}} {self.device} names more than the {self.workers} workers there are")
        if self.parallel == "data" and len(set(self.devices)) > 1:
            raise OptionError(f"replicas compute on one kind of device; {{device}} {self.device} names two")
        pieces = self.chunks * self.replicas
        if self.batch_size % pieces:
            replicas = f" and {self.replicas} replicas" if self.replicas > 1 else ""
            raise OptionError(
                f"all chunks have the same size: {{batch_size}} {self.batch_size} is not a multiple of {self.chunks} "
                f"chunks{replicas}; take {max(self.batch_size // pieces, 1) * pieces}, or change {{chunks}}"
            )

    @property
    def replicas(self) -> int:
        return self.workers if self.parallel == "data" else 1

    @property
    def devices(self) -> list[str]:
        """The kind of device of every worker."""
        named = self.device.split(",")
        return (named + named[-1:] * self.workers)[: self.workers]

    @property
    def step_samples(self) -> int:
        return self.batch_size * self.accumulate

    @property
    def chunk_size(self) -> int:
        return self.batch_size // (self.chunks * self.replicas)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def shared(self) -> dict[str, Any]:
        """Return the settings that are the same on all machines."""
        own = per_machine_settings()
        return {name: value for name, value in self.to_json().items() if name not in own}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Settings:
        """Return the settings in ``saved``; raise ValueError for missing or unknown names, or wrong types."""
        return from_facts(Settings, saved, "its settings")


def per_machine_settings() -> list[str]:
    """Return the names of settings whose values may differ between machines."""
    return [name for name, told in options_of(Settings).items() if told.per_machine]
