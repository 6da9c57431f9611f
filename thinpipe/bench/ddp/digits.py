"""Whether compressed gradients cost accuracy: a small network on scikit-learn's digits, on all replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinpipe.ddp import ddp_hook, ddp_state
from thinpipe.measure.record import Check, Column, Record, Row
from thinpipe.measure.report import Table
from thinpipe.workloads.digits import digits
from thinpipe.workloads.splits import split_fifth

KIND = "bench ddp-accuracy"
BASELINE = "none"  # the hook with it equals DDP without one to the last bit, and counts its bytes
POINTS_LOST = 1.0  # that compression may cost, in percent of the images

COLUMNS = (
    Column(name="codec", heading="codec", key=True),
    Column(name="seed", heading="seed", key=True),
    Column(name="accuracy_percent", heading="accuracy\n%", format=".2f", better="higher"),
    Column(name="loss", heading="training\nloss", format=".4f", better="lower"),
    Column(name="gradient_bytes", heading="gradient\nbytes", format="d"),
    Column(name="wire_bytes", heading="wire\nbytes", format="d", better="lower"),
    Column(name="wire_ratio", heading="wire", format=".3f", better="lower"),
)
_MEAN_COLUMNS = (
    COLUMNS[0],
    Column(name="accuracy", heading="accuracy\n%"),
    Column(name="worst", heading="worst\nseed", format=".2f"),
    Column(name="wire_mb", heading="sent by a\nreplica MB", format=".2f"),
    Column(name="wire_ratio", heading="of un-\ncompressed", format=".3f"),
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the network is trained; the same for every codec."""

    codecs: tuple[str, ...]
    seeds: int
    epochs: int
    batch_size: int  # of all replicas together
    lr: float = 0.05
    error_feedback: bool = True


def compare_accuracy(recipe: Recipe, command: Sequence[str]) -> Record | None:
    """Train with every codec and seed, on all replicas; the record on the first replica, None elsewhere."""
    group = dist.new_group(backend="gloo")  # the network stays on CPUs, also where there are GPUs
    rows = [
        {"codec": spec, "seed": seed, **train(spec, seed, recipe, group)}
        for spec in recipe.codecs
        for seed in range(recipe.seeds)
    ]
    if dist.get_rank() != 0:
        return None
    config = {"command": list(command), "replicas": dist.get_world_size(), **asdict(recipe)}
    return Record(kind=KIND, config=config, columns=COLUMNS, rows=tuple(rows), checks=tuple(checks(rows)))


def train(spec: str, seed: int, recipe: Recipe, group: dist.ProcessGroup) -> dict[str, float]:
    """Train one network; every replica sees its share of every batch."""
    images, labels = digits()
    training, test = split_fifth(len(images))
    torch.manual_seed(seed)
    model = DistributedDataParallel(network(), process_group=group)
    state = ddp_state(spec, process_group=group, error_feedback=recipe.error_feedback)
    model.register_comm_hook(state, ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9)
    shuffled = torch.Generator().manual_seed(seed)  # of its own: every replica shuffles alike
    last = torch.zeros(())
    for _ in range(recipe.epochs):
        for share in _shares(training, recipe.batch_size, shuffled):
            optimizer.zero_grad()
            last = nn.functional.cross_entropy(model(images[share]), labels[share])
            last.backward()
            optimizer.step()
    with torch.no_grad():
        right = (model.module(images[test]).argmax(1) == labels[test]).float().mean().item()
    return {
        "accuracy_percent": 100 * right,
        "loss": last.item(),
        "gradient_bytes": state.gradient_bytes,
        "wire_bytes": state.wire_bytes,
        "wire_ratio": state.wire_bytes / state.gradient_bytes,
    }


def network() -> nn.Module:
    """Two convolutions and two layers on 8 x 8 pixels: 150 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def checks(rows: Sequence[Row]) -> Iterator[Check]:
    """What compression may cost: a point of accuracy, on the mean of the seeds."""
    accuracy = {spec: mean(row["accuracy_percent"] for row in each) for spec, each in _by_codec(rows)}
    for spec, of_codec in accuracy.items():
        if spec != BASELINE and BASELINE in accuracy:
            yield Check(
                claim=f"{spec}: accuracy below uncompressed",
                measured=accuracy[BASELINE] - of_codec,
                limit=POINTS_LOST,
                unit=" points",
            )


def mean_table(rows: Sequence[Row]) -> Table:
    """A row for every codec, over its seeds."""
    shown = []
    for spec, each in _by_codec(rows):
        accuracies = [row["accuracy_percent"] for row in each]
        spread = stdev(accuracies) if len(each) > 1 else 0.0
        shown.append(
            {
                "codec": spec,
                "accuracy": f"{mean(accuracies):.2f} ± {spread:.2f}",
                "worst": min(accuracies),
                "wire_mb": mean(row["wire_bytes"] for row in each) / 1e6,
                "wire_ratio": mean(row["wire_ratio"] for row in each),
            }
        )
    title = f"Digits, {len(rows) // len(shown)} seeds: accuracy, and what one replica sent"
    return Table(title=title, columns=_MEAN_COLUMNS, rows=shown)


def _by_codec(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    specs = dict.fromkeys(row["codec"] for row in rows)
    return [(spec, [row for row in rows if row["codec"] == spec]) for spec in specs]


def _shares(indices: Tensor, batch_size: int, shuffled: torch.Generator) -> Iterator[Tensor]:
    """This replica's part of every whole batch of an epoch."""
    rank, replicas = dist.get_rank(), dist.get_world_size()
    order = indices[torch.randperm(len(indices), generator=shuffled)]
    for batch in order[: len(order) // batch_size * batch_size].split(batch_size):
        yield batch[rank::replicas]
