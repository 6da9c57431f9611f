"""Options of the data-parallel benchmark, checked before any replica starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinpipe.codecs.spec import codec
from thinpipe.comm.membership import member
from thinpipe.lab.bench.inputs import COUNT, HOW, WHAT, find_device, shared
from thinpipe.lab.bench.models import MODELS, Shapes, check_model, least_bytes
from thinpipe.lab.netem.network import check_links
from thinpipe.options import OptionError, above, between, check, option
from thinpipe.system.sizes import check_fits
from thinpipe.train.shaping import Shaping, parse_link

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_BUCKET_MB = 1_000_000  # torch counts bucket bytes in a 64-bit integer
POWERSGD_START = 2  # the first iteration that torch lets PowerSGD compress: the one before rebuilds the buckets


def _models(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names)) or ("resnet50",)


@dataclass(frozen=True, kw_only=True)
class DDPBenchOptions:
    """The models, links and timing options of the benchmark; the same on all replicas."""

    workers: int | None = shared(
        "workers",
        "Replicas to start on this machine; with {rank}, replicas on all machines. Leave out under torchrun.",
        default_text="one per GPU; 2 on CPU",
        default=None,
    )
    models: tuple[str, ...] = option(
        f"{', '.join(MODELS)}, or your own as package.module:function: given the batch size, it returns a model, a "
        "tuple of inputs, and a function from output to loss. Repeat for several.",
        name="model",
        panel=WHAT,
        metavar="NAME",
        kind=list[str],
        parse=_models,
        default=("resnet50",),
    )
    batch_size: int = shared("batch_size", "Samples per batch of each replica.", default=32)
    image_size: int = option(
        "Width and height of images, in pixels.", panel=WHAT, metavar="PIXELS", rule=between(32, 1_000_000), default=224
    )
    tokens: int = option("Tokens per text.", panel=WHAT, metavar="N", rule=between(1, 1_000_000), default=128)
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "Dtype of weights and data.", panel=WHAT, default="float32"
    )
    device: str = shared("device", "Device of the replicas.")
    backend: Literal["gloo", "nccl"] | None = option(
        "Backend of torch.distributed.", panel=HOW, default_text="nccl if each has its own GPU, else gloo", default=None
    )
    link: Shaping | None = shared(  # also describes a real link between machines, for the record
        "link",
        "Emulate links between local replicas, as in 100mbit or 100mbit/20mbit,40ms,0.1%; needs root. "
        "Between machines: the link that there is, for the record.",
        metavar="LINK",
        parse=parse_link,
        default_text="not emulated",
        default=None,
    )
    bucket_cap_mb: float = option(
        "Size of the gradient buckets, in MiB.", panel=HOW, metavar="MIB", rule=above(0, MOST_BUCKET_MB), default=25.0
    )
    static_graph: bool = option(
        "Set static_graph of DistributedDataParallel: every iteration has the same graph.", panel=HOW, default=False
    )
    gradient_as_bucket_view: bool = option(
        "Set gradient_as_bucket_view of DistributedDataParallel: gradients are views of buckets.",
        panel=HOW,
        default=False,
    )
    compress: str | None = shared(
        "compress",
        "Compress gradients with this codec and error feedback, in thinpipe's hook: uniform:8, power:4, ...",
        metavar="SPEC",
        default_text="no hook",
        default=None,
    )
    hook: Literal["fp16", "bf16", "powersgd"] | None = option(
        "Compress gradients with a hook of torch instead.", panel=WHAT, default_text="no hook", default=None
    )
    warmup: int = shared("skip_steps", rule=COUNT, default=5)
    iterations: int = shared("steps", default=20)

    def __post_init__(self) -> None:
        check(self)
        if self.compress is not None and self.hook is not None:
            raise OptionError(
                f"gradients go through one hook: {{compress}} {self.compress} for thinpipe's or {{hook}} {self.hook} "
                "for torch's, not both"
            )
        if self.hook == "powersgd" and self.warmup <= POWERSGD_START:
            raise OptionError(
                f"{{hook}} powersgd compresses from iteration {POWERSGD_START + 1} on: give {{skip_steps}} "
                f"{POWERSGD_START + 1} or more, not {self.warmup}"
            )

    def check_here(self) -> None:
        """Raise OptionError for settings that cannot be measured on this machine."""
        for model in self.models:
            check_model(model)
            shapes = Shapes(batch_size=self.batch_size, image_size=self.image_size, tokens=self.tokens)
            check_fits(f"{{model}} {model} with a batch of this size", least_bytes(model, shapes), "take a smaller one")
        on_gpus = self.found_device.type == "cuda"
        if self.backend == "nccl" and not on_gpus:
            raise OptionError("{backend} nccl joins GPUs; with {device} cpu give {backend} gloo")
        if self.hook == "bf16" and (self.backend == "gloo" or not on_gpus):
            raise OptionError(
                "{hook} bf16 adds in bfloat16, which torch leaves to nccl; {compress} bf16 runs everywhere"
            )

        me = member()
        if me is not None and self.workers not in (None, me.size):
            raise OptionError(f"torchrun has started {me.size} replicas: leave out {{workers}} {self.workers}")
        check_links([self.emulated_link], max(self.local_workers or 2, 2))

    @property
    def joined_workers(self) -> int | None:
        """The number of workers with --rank and --master."""
        return self.workers

    @property
    def local_workers(self) -> int | None:
        """The number of replicas to start; None if torchrun or the user has started them."""
        if member() is not None:
            return None
        return self.workers or (torch.cuda.device_count() if self.found_device.type == "cuda" else 2)

    @property
    def emulated_link(self) -> Shaping | None:
        """The link to emulate; None between machines, which have their own."""
        return None if member() is not None else self.link

    @property
    def found_device(self) -> torch.device:
        """The device; OptionError if it is not available or the codec does not support it."""
        return find_device(self.device, [] if self.compress is None else [codec(self.compress)])
