"""Settings that define a run and are stored in its checkpoints; options of one execution are in running.py.

Those that tasks use are declared in tasks/options.py. How an option is declared: thinpipe/options.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from thinpipe.codecs.recipes import is_adaptive
from thinpipe.codecs.spec import codec
from thinpipe.links.registry import check_directions
from thinpipe.options import OptionError, Rule, above, below, between, check, from_facts, options_of, pair
from thinpipe.pipeline.order import ORDERS, Order, is_order
from thinpipe.pipeline.partition import Layout
from thinpipe.train.events import Parallel
from thinpipe.train.models.adapters import MOST_RANK, Lora
from thinpipe.train.models.pretrained import FLASH
from thinpipe.train.tasks.options import COUNT, Source, TaskDefaults
from thinpipe.train.tasks.panels import link_option, model_option, stage_option, training_option
from thinpipe.train.tasks.tasks import TASKS

AUTO_EVERY = 20  # steps


def _cuts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise OptionError(f"{{cuts}} are numbers of units, as in 3,7; got {text}")
    return tuple(map(int, parts))


@dataclass(frozen=True, kw_only=True)
class _TaskName:
    task: str = model_option(
        f"One of {', '.join(TASKS)}; or your own, package.module:Class.",
        metavar="NAME",
        default_value="digits",
        default_text="digits; lm with a {model}",
    )


@dataclass(frozen=True, kw_only=True)
class Trained(Source, _TaskName):
    """Task, data and model: the part of the settings that a task needs."""

    lora: int | None = model_option(
        "Train LoRA adapters of this rank on the blocks, and a classifier's head; freeze all other weights.",
        metavar="RANK",
        default_text="train all weights",
        rule=between(1, MOST_RANK),
        training_only=True,
        default=None,
    )
    lora_target: str | None = model_option(
        "Layers of the blocks with adapters, as in q_proj,v_proj, or all-linear.",
        metavar="NAME,...",
        default_text="the architecture's",
        training_only=True,
        advanced=True,
        default=None,
    )
    lora_alpha: float | None = model_option(
        "LoRA scaling numerator; the update is scaled by X / rank.",
        metavar="X",
        default_text="twice the rank",
        rule=above(0, 1e6),
        training_only=True,
        advanced=True,
        default=None,
    )
    lora_dropout: float = model_option(
        "Dropout of adapters.", metavar="X", rule=below(1), training_only=True, advanced=True, default=0.0
    )
    quantize: Literal["nf4"] | None = model_option(
        "Hold frozen weights of the blocks in 4 bits, under the adapters of {lora}.",
        kind=Literal["nf4"],
        metavar="TYPE",
        default_text="not quantized",
        training_only=True,
        advanced=True,
        default=None,
    )
    freeze: tuple[str, ...] = model_option(
        "Freeze the parameters that match a pattern, as in '*.embed_tokens.*'; repeatable.",
        metavar="PATTERN",
        kind=list[str],
        parse=lambda patterns: tuple(patterns) or None,
        default_text="none",
        training_only=True,
        advanced=True,
        default=(),
    )

    def check_source(self) -> None:
        """Raise OptionError for options that contradict each other."""
        more = {"lora_target": self.lora_target, "lora_alpha": self.lora_alpha, "lora_dropout": self.lora_dropout}
        given = [name for name, value in more.items() if value]
        if given and self.lora is None:
            raise OptionError(
                f"{{{given[0]}}} is an option of adapters: give their rank with {{lora}}, as in {{lora}} 8"
            )
        if self.quantize is not None and self.lora is None:
            raise OptionError("4-bit weights are not trained: with {quantize}, train adapters, as in {lora} 8")
        if self.model is not None and self.config is not None:
            raise OptionError(
                "{model} starts from a model's weights, {config} from its description alone: give one of them"
            )
        if self.config_set is not None and self.config is None:
            raise OptionError("{config_set} changes values of {config}: name a model type or a folder with {config}")

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
        return Source(**{each.name: getattr(self, each.name) for each in fields(Source)})


@dataclass(frozen=True, kw_only=True)
class Settings(Trained, TaskDefaults):
    """All settings that the result of a run depends on.

    Settings with a default are missing in checkpoints of older versions, which behaved as the default specifies.
    ``movable`` marks settings that may change when a run resumes: the placement of computations, and the location of
    data and weights. A value above a setting's maximum can only be a mistake, and some would end the process without an
    error message: OpenMP aborts if it cannot start its threads, torch raises if a factor exceeds the range of float32.
    """

    parallel: Parallel = stage_option(
        "Stages of the model on several workers, replicas of the model, or one process.",
        default_value="pipeline",
        evaluates=True,
        kept="always",
    )
    workers: int = stage_option(
        "Workers to start; with {rank}, workers on all machines. Under torchrun: leave it out.",
        metavar="N",
        default_text="2",
        rule=between(1, 4096),
        movable=True,
        evaluates=True,
        kept="same parallel",
    )
    layout: Layout = stage_option(
        "Worker 0, the client, has the first and the last stage, or the first stage only.",
        kind=Literal["client-server", "linear"],
        default_value="client-server",
        movable=True,
        evaluates=True,
        kept="same parallel",
    )
    schedule: Order = stage_option(
        "gpipe runs all forwards, then all backwards; 1f1b runs backwards as early as possible, with as many "
        "microbatches in flight as the delay of {link} needs; 1f1b:N with N in flight.",
        metavar="NAME",
        rule=Rule(ORDERS, is_order),
        default_value="gpipe",
        advanced=True,
    )
    compress_forward: str = link_option(
        "Codec of activations; axes:B learns a basis.",
        metavar="SPEC",
        default_text="as {compress}",
        kept="same parallel",
        advanced=True,
    )
    compress_backward: str = link_option(
        "Codec of gradients.", metavar="SPEC", default_text="as {compress}", advanced=True
    )
    auto_every: int | None = link_option(
        "Steps between two choices of the bits of links by {compress} auto.",
        metavar="N",
        default_text=f"{AUTO_EVERY}",
        rule=between(8, 1_000_000),
        movable=True,
        advanced=True,
        default=None,
    )
    cuts: tuple[int, ...] | None = stage_option(
        "Units at which stages begin, as in 3,7 for three stages.",
        metavar="N,...",
        parse=_cuts,
        default_text="balanced by operations",
        movable=True,
        advanced=True,
        default=None,
    )
    accumulate: int = training_option(
        "Batches per update; their gradients are accumulated.",
        metavar="N",
        rule=COUNT,
        aliases=("gradient_accumulation_steps",),
        advanced=True,
        default=1,
    )
    dpo_beta: float | None = training_option(
        "Weight of the reference model in direct preference optimization (task preference).",
        metavar="X",
        default_text="0.1",
        rule=above(0, 1000),
        advanced=True,
        default=None,
    )
    early_stopping: int | None = training_option(
        "End the run after N evaluations without a better validation metric.",
        metavar="N",
        default_text="never",
        rule=COUNT,
        movable=True,
        advanced=True,
        default=None,
    )
    nesterov: bool = training_option("Nesterov momentum for SGD.", advanced=True, default=False)
    adam_betas: tuple[float, float] = training_option(
        "Decay rates of AdamW's first and second moments, as in 0.9,0.95.",
        metavar="A,B",
        parse=pair("adam_betas", float, "0.9,0.95"),
        rule=Rule("two numbers from 0 to below 1", lambda betas: len(betas) == 2 and all(0 <= b < 1 for b in betas)),
        advanced=True,
        default=(0.9, 0.999),
    )
    amp: bool = training_option(
        "Compute in bfloat16 where that is safe (autocast).", evaluates=True, kept="always", default=False
    )
    recompute: bool = stage_option(
        "Recompute activations in the backward pass to save memory.",
        aliases=("gradient_checkpointing",),
        advanced=True,
        default=False,
    )
    compile: bool = training_option(
        "Compile the blocks with torch.compile: a minute at the start; small microbatches on GPUs run faster.",
        movable=True,
        advanced=True,
        default=False,
    )
    seed: int = training_option(
        "Seed of weights, data and dropout.",
        metavar="N",
        default_value=0,
        rule=below(2**32, most_text="2^32"),
        evaluates=True,
        kept="always",
    )
    device: str = stage_option(
        "Device of the workers: cpu, cuda, or cpu,cuda for a client without a GPU.",
        metavar="NAME",
        parse=lambda text: None if text == "auto" else text,
        default_text="auto: cuda if there is one",
        rule=Rule(
            "auto, cpu, cuda, or a list of the last two: the first is the client's, the last for all that follow",
            lambda text: all(name in ("cpu", "cuda") for name in text.split(",")),
        ),
        movable=True,
        evaluates=True,
    )
    threads: int | None = stage_option(  # None: set by the environment
        "Threads per worker.",
        metavar="N",
        default_text="cores / workers",
        rule=between(1, 1024),
        movable=True,
        per_machine=True,
        evaluates=True,
        advanced=True,
        default=None,
    )
    error_feedback: bool = link_option(
        "Replicas add the compression error of a gradient to the next one.", negative=True, advanced=True, default=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_adaptive()
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
        if self.attention == FLASH and (self.devices[-1] == "cpu" or (self.dtype == "float32" and not self.amp)):
            raise OptionError(
                f"{{attention}} {FLASH} computes in bfloat16 on GPUs; here are {{device}} {self.device} and {{dtype}} "
                f"{self.dtype}: give {{device}} cuda and {{dtype}} bfloat16, or another {{attention}}"
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

    def _check_adaptive(self) -> None:
        if self.is_adaptive and self.parallel != "pipeline":
            raise OptionError(
                f"{{compress}} auto adapts the links of a pipeline; with {{parallel}} {self.parallel} give one codec, "
                "as in gauss:4, or leave it out"
            )
        if self.auto_every is not None and not self.is_adaptive:
            raise OptionError("{auto_every} is for {compress} auto: give both, or leave it out")

    @property
    def is_adaptive(self) -> bool:
        """True if the bits of some links are chosen in training."""
        return is_adaptive(self.compress_forward) or is_adaptive(self.compress_backward)

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
        return {name: str(each) if isinstance(each, Path) else each for name, each in asdict(self).items()}

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
    return [name for name, declared in options_of(Settings).items() if declared.per_machine]
