"""What the benchmark of iteration times measures and how, checked before any replica starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinpipe.bench.inputs import check_counts, find_device
from thinpipe.bench.models import Shapes, check_model, least_bytes
from thinpipe.codecs.spec import codec
from thinpipe.measure.memory import check_fits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_BUCKET_MB = 1_000_000  # torch counts buckets in bytes of 64 bits
POWERSGD_START = 2  # the first iteration torch lets PowerSGD compress: the one before rebuilds the buckets


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured and how; the same on every replica."""

    models: tuple[str, ...]
    batch_size: int  # of one replica
    image_size: int
    tokens: int
    dtype: str
    device: str  # cpu or cuda
    backend: str | None  # None: nccl where every replica has a GPU of its own, gloo otherwise
    link_mbit_per_s: float | None  # of the link between machines, where it is known
    bucket_cap_mb: float
    static_graph: bool
    gradient_as_bucket_view: bool
    compress: str | None  # a codec of thinpipe's hook
    hook: str | None  # or one of torch's
    warmup: int  # iterations that are not timed
    iterations: int  # that are

    def check(self) -> None:
        """ValueError for what cannot be measured here."""
        check_counts(warmup=self.warmup, iterations=self.iterations)
        if not self.bucket_cap_mb <= MOST_BUCKET_MB:
            raise ValueError(f"--bucket-cap-mb is at most {MOST_BUCKET_MB}; got {self.bucket_cap_mb}")
        for model in self.models:
            check_model(model)
            shapes = Shapes(batch_size=self.batch_size, image_size=self.image_size, tokens=self.tokens)
            check_fits(f"--model {model} with a batch of this size", least_bytes(model, shapes), "take a smaller one")
        if self.compress is not None and self.hook is not None:
            raise ValueError(
                f"gradients go through one hook: --compress {self.compress} for thinpipe's or --hook {self.hook} for "
                "torch's, not both"
            )
        find_device(self.device, [] if self.compress is None else [codec(self.compress)])
        if self.backend == "nccl" and self.device != "cuda":
            raise ValueError("--backend nccl joins GPUs; with --device cpu give --backend gloo")
        if self.hook == "bf16" and (self.backend == "gloo" or self.device != "cuda"):
            raise ValueError(
                "--hook bf16 adds in bfloat16, which torch leaves to nccl; --compress bf16 runs everywhere"
            )
        if self.hook == "powersgd" and self.warmup <= POWERSGD_START:
            raise ValueError(
                f"--hook powersgd compresses from iteration {POWERSGD_START + 1} on: give --warmup "
                f"{POWERSGD_START + 1} or more, not {self.warmup}"
            )
