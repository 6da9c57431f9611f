"""What a run is (Settings, which a checkpoint keeps) and how it is carried out this time (Running)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from thinpipe.codecs.recipes import DEFAULT_RECIPE, directions
from thinpipe.codecs.spec import codec
from thinpipe.pipeline.links.spec import check_directions
from thinpipe.pipeline.order import Order
from thinpipe.pipeline.partition import Layout
from thinpipe.training.events import Parallel
from thinpipe.training.typed import from_facts
from thinpipe.workers.membership import PATIENCE_S
from thinpipe.workloads.task import LrSchedule, Optimizer, Recipe, Source

Device = Literal["cpu", "cuda"]

# What may be other when a run goes on: who computes what and with what, and where data and weights are.
MOVABLE = ("workers", "layout", "client_layers", "device", "threads", "data", "weights")
# More can only be a mistake, and some of them end the process without a word: OpenMP aborts where it cannot start its
# threads, torch raises where a factor is above what a float of 32 bits can be. What depends on the machine's memory is
# checked with the task, in foresight.py.
_MOST_COUNTS = {
    "workers": 4096,
    "chunks": 1_000_000,
    "batch_size": 1_000_000_000,
    "epochs": 1_000_000_000,
    "threads": 1024,
    "image_size": 1_000_000,
    "tokens": 1_000_000,
    "samples": 1 << 62,
}
_MOST_FACTORS = {"lr": 1e6, "width": 1e6, "clip_norm": 1e30}
_MOST_DECAY = 1000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the outcome of a run depends on.

    What has a default is missing in checkpoints of versions that did not know it, which did what the default says.
    """

    task: str
    parallel: Parallel
    workers: int
    layout: Layout
    client_layers: (
        tuple[int, int] | None
    )  # units at both ends that stay with the client; None: as balance says, or a line
    schedule: Order
    chunks: int  # that each worker cuts its batch into
    compress_forward: str  # codec of activations
    compress_backward: str  # codec of gradients
    batch_size: int  # of all replicas together
    epochs: int
    optimizer: Optimizer
    lr: float
    lr_schedule: LrSchedule
    warmup: float
    momentum: float
    weight_decay: float
    clip_norm: float | None = None
    amp: bool = False  # bfloat16 where torch's autocast finds it safe
    recompute: bool = False
    seed: int
    device: Device
    threads: int | None = None  # of each worker; None: as the environment says
    data: str | None = None
    weights: str | None = None
    pretrained: bool
    image_size: int | None = None
    tokens: int | None = None
    width: float | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        # A ValueError of theirs says what is wrong.
        check_directions(self.compress_forward, self.compress_backward)
        if self.parallel != "pipeline":
            codec(self.compress_forward)
        hints = get_type_hints(Settings)
        for name in ("parallel", "layout", "schedule", "optimizer", "lr_schedule", "device"):
            _check_one_of(name, getattr(self, name), get_args(hints[name]))
        for name, most in _MOST_COUNTS.items():
            _check_between(name, getattr(self, name), 1, most)
        for name, largest in _MOST_FACTORS.items():
            _check_between(name, getattr(self, name), 0, largest, above=True)
        for name in ("momentum", "warmup"):
            _check(name, getattr(self, name), "from 0 to below 1", lambda value: 0 <= value < 1)
        _check_between("weight_decay", self.weight_decay, 0, _MOST_DECAY)
        _check("seed", self.seed, "from 0 to below 2^32", lambda value: 0 <= value < 2**32)
        if self.parallel == "pipeline" and self.workers < 2:
            raise ValueError(
                f"a pipeline has 2 workers or more, got {self.workers}; --parallel none trains in one process"
            )
        if self.parallel == "none" and self.workers != 1:
            raise ValueError(f"--parallel none is one worker, got {self.workers}; leave out --workers")
        if self.parallel == "data" and self.compress_forward != self.compress_backward:
            raise ValueError(
                "replicas exchange gradients only: give --parallel data one codec with --compress, "
                f"not {self.compress_forward} forward and {self.compress_backward} backward"
            )
        pieces = self.chunks * self.replicas
        if self.batch_size % pieces:
            replicas = f" and {self.replicas} replicas" if self.replicas > 1 else ""
            raise ValueError(
                f"all chunks have the same size: --batch-size {self.batch_size} is not a multiple of {self.chunks} "
                f"chunks{replicas}; take {max(self.batch_size // pieces, 1) * pieces}, or change --chunks"
            )

    @property
    def replicas(self) -> int:
        return self.workers if self.parallel == "data" else 1

    @property
    def chunk_size(self) -> int:
        return self.batch_size // (self.chunks * self.replicas)

    @property
    def source(self) -> Source:
        return Source(
            data=None if self.data is None else Path(self.data),
            weights=None if self.weights is None else Path(self.weights),
            pretrained=self.pretrained,
            image_size=self.image_size,
            tokens=self.tokens,
            width=self.width,
            samples=self.samples,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Settings:
        """ValueError for what is missing, unknown or of another type."""
        return from_facts(Settings, saved, "its settings")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What of a run is kept to try codecs on."""

    path: Path
    steps: tuple[int, ...] | None = None  # counted from 1; None: a few, spread over the run
    chunks: int = 1  # of each such step, the first ones
    limit: int = 1 << 30  # bytes

    def __post_init__(self) -> None:
        if self.path.suffix != ".safetensors":
            raise ValueError(f"--capture writes FILE.safetensors; got {self.path}")
        _check("capture_chunks", self.chunks, "1 or more", lambda value: value >= 1)
        for step in self.steps or ():
            _check("capture_steps", step, "steps counted from 1", lambda value: value >= 1)


@dataclass(frozen=True, kw_only=True)
class Running:
    """How a run is carried out: may differ each time it is taken up, and changes nothing about where it ends."""

    save: Path | None = None  # where checkpoints go
    save_every: int | None = None  # steps; None: epochs
    keep: int = 2  # of the newest checkpoints
    save_local: bool = False  # the client keeps all parts of them: its folder need not be shared
    resume: Path | None = None  # one checkpoint to go on from, or a folder: the newest in it that is whole
    steps: int | None = None  # stop after so many, counted from the very first
    trace: Path | None = None  # a picture or a Chrome trace of one step
    delta_cache: Path | None = None  # where delta(...) keeps its copies of samples; None: in memory
    delta_cache_limit: int = 4 << 30  # bytes of them on one machine
    capture: Capture | None = None  # what crosses the links in a few steps
    link: float | None = None  # Mbit/s between the workers; None: as the machine is
    patience_s: float = PATIENCE_S  # how long a worker that is missing or silent is waited for

    def __post_init__(self) -> None:
        for name in ("save_every", "keep", "steps"):
            _check_between(name, getattr(self, name), 1, 1_000_000_000)
        _check_between("patience", self.patience_s, 2, 1_000_000)
        if self.save is None and self.save_every is not None:
            raise ValueError("--save-every needs a folder for the checkpoints: name one with --save")
        if self.save is None and self.save_local:
            raise ValueError("--save-local says who keeps the checkpoints: name a folder for them with --save")
        if self.trace is not None and self.trace.suffix not in (".png", ".json"):
            raise ValueError(
                f"--trace draws a picture, FILE.png, or writes a Chrome trace, FILE.json; got {self.trace}"
            )


def settle(given: Mapping[str, Any], recipe: Recipe, *, workers: int | None, device: Device) -> Settings:
    """Settings from what the user gave (names as in Settings, and ``compress`` for both directions) and the recipe.

    ``workers`` is how many there are if that is settled already (torchrun).
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    parallel = chosen.get("parallel", "pipeline")
    count = chosen.get("workers", workers or (1 if parallel == "none" else 2))
    layout = chosen.get("layout", "client-server")
    client_server = parallel == "pipeline" and layout == "client-server"
    idle = [name for name in ("layout", "client_layers", "schedule", "recompute") if chosen.get(name)]
    if parallel != "pipeline" and idle:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise ValueError(f"{options} shape a pipeline; leave them out with --parallel {parallel}")
    if not client_server and "client_layers" in chosen:
        raise ValueError("--client-layers is for --parallel pipeline with --layout client-server; leave it out")
    if "compress" in chosen and {"compress_forward", "compress_backward"} & chosen.keys():
        raise ValueError("--compress sets both directions: give it, or --compress-forward and --compress-backward")
    chosen = _with_codecs(chosen, parallel)
    forward, backward = directions(DEFAULT_RECIPE if parallel == "pipeline" else "none")
    defaults: dict[str, Any] = {
        "task": "digits",
        "parallel": parallel,
        "workers": count,
        "layout": layout,
        "client_layers": recipe.client_layers if client_server else None,
        "schedule": "gpipe",
        "compress_forward": forward,
        "compress_backward": backward,
        "amp": False,
        "recompute": False,
        "seed": 0,
        "device": device,
        "pretrained": True,
    }
    names = [field.name for field in fields(Settings)]
    from_recipe = {name: getattr(recipe, name) for name in names if hasattr(recipe, name) and name not in defaults}
    if parallel != "pipeline":
        from_recipe["chunks"] = 1
    nothing = {field.name: None if field.default is MISSING else field.default for field in fields(Settings)}
    return Settings(**{**nothing, **from_recipe, **defaults, **chosen})


def settle_again(given: Mapping[str, Any], saved: Settings) -> Settings:
    """The settings a run was saved with, but for those that may move; ValueError if the user gave others."""
    asked = _with_codecs({name: value for name, value in given.items() if value is not None}, saved.parallel)
    shapes = () if saved.parallel == "pipeline" else ("layout", "client_layers")  # of a pipeline
    moved = {name: value for name, value in asked.items() if name in MOVABLE and name not in shapes}
    differing = [
        f"  --{name.replace('_', '-')}: {_words(getattr(saved, name))} when it was saved, {_words(value)} now"
        for name, value in asked.items()
        if name not in moved and value != getattr(saved, name)
    ]
    if differing:
        raise ValueError(
            "a run goes on with the options it was saved with, these differ:\n"
            + "\n".join(differing)
            + "\nLeave them out: --resume knows them. Or start a new run without it."
        )
    layout = moved.get("layout", saved.layout)
    if layout != "client-server" and "client_layers" in moved:
        raise ValueError("--client-layers is for --layout client-server; leave it out")
    if layout != saved.layout:
        moved.setdefault("client_layers", None)  # a client's layers then are those that balance the work
    return replace(saved, **moved)


def fixed_differences(saved: Settings, here: Settings) -> list[str]:
    """The settings that differ and may not."""
    return [
        field.name
        for field in fields(Settings)
        if field.name not in MOVABLE and getattr(saved, field.name) != getattr(here, field.name)
    ]


def _with_codecs(given: Mapping[str, Any], parallel: str) -> dict[str, Any]:
    """Options in which every direction has a codec of its own, and no recipe. Replicas send gradients alone."""
    settled = dict(given)
    if "compress" in settled:
        both = settled.pop("compress")
        settled |= {"compress_forward": both, "compress_backward": both}
    if "compress_forward" in settled:
        settled["compress_forward"] = directions(settled["compress_forward"])[parallel == "data"]
    if "compress_backward" in settled:
        settled["compress_backward"] = directions(settled["compress_backward"])[1]
    return settled


def _words(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_between(name: str, value: Any, least: float, most: float, *, above: bool = False) -> None:
    """ValueError unless least <= value <= most, or, ``above``, least < value: neither NaN nor infinity is."""
    rule = f"above {least:g} and at most {most:g}" if above else f"from {least} to {most}"
    _check(name, value, rule, lambda value: least <= value <= most and not (above and value == least))


def _check(name: str, value: Any, rule: str, holds: Callable[[Any], bool]) -> None:
    if value is not None and not holds(value):
        raise ValueError(f"--{name.replace('_', '-')} is {rule}; got {value}")


def _check_one_of(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ValueError(f"--{name.replace('_', '-')} is {', '.join(known)}; got {value}")
