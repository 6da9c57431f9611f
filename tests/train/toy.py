"""A task small enough to train in milliseconds, and a listener that keeps what it hears."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.comm.group import Group
from thinpipe.train.checkpoints.folder import load, newest
from thinpipe.train.engines.world import World
from thinpipe.train.events import ChosenBits, Epoch, Finished, Plan, Step
from thinpipe.train.resolve import resolve
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import Batch, Data, Shape, Source, Task, TaskDefaults
from thinpipe.train.worker import train

FEATURES, CLASSES = 256, 5
VALIDATION = 23  # prime: no batch size divides it


class ToySplit:
    """Points around the centres of their classes; one of them may be NaN."""

    def __init__(self, samples: int, seed: int, nan_at: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1))
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        self.points = centres[self.labels] + torch.randn(samples, FEATURES, generator=generator)
        if nan_at is not None:
            self.points[nan_at, 0] = float("nan")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        return Batch(inputs=(self.points[indices],), labels=self.labels[indices])

    def describe(self, indices: Tensor) -> dict[str, bytes]:
        return {"labels": self.labels[indices].numpy().tobytes()}


class AugmentedSplit(ToySplit):
    """Noise on every point, drawn from the batch's seed."""

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        batch = super().batch(indices)
        if augment_seed is None:
            return batch
        noise = torch.randn(batch.inputs[0].shape, generator=torch.Generator().manual_seed(augment_seed))
        return Batch(inputs=(batch.inputs[0] + 0.1 * noise,), labels=batch.labels)


class ToyTask(Task):
    """Five layers and a classifier: six units."""

    name = "toy"
    summary = "points around centres"
    metric = "accuracy"
    defaults = TaskDefaults(batch_size=18, chunks=3, epochs=2, optimizer="sgd", lr=0.05, lr_schedule="cosine")

    def __init__(
        self, kind: str = "plain", *, nan_at: int | None = None, trap: Callable[[nn.Sequential], None] | None = None
    ) -> None:
        self.kind, self.nan_at, self.trap = kind, nan_at, trap

    def load(self, source: Source) -> tuple[Data, Shape]:
        split = ToySplit if self.kind == "plain" else AugmentedSplit
        data = Data(train=split(80, 2, self.nan_at), validation=ToySplit(VALIDATION, 3), classes=CLASSES)
        return data, Shape(classes=CLASSES)

    def build(self, shape: Shape, source: Source) -> nn.Module:
        between: dict[str, Any] = {
            "plain": nn.Tanh,
            "batchnorm": lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Tanh()),
            "dropout": lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.2)),
        }
        layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), between[self.kind]()) for _ in range(5)]
        model = nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))
        if self.trap is not None:
            self.trap(model)
        return model


class Recorder:
    """Keeps everything it is told."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.steps: list[Step] = []
        self.epochs: list[Epoch] = []
        self.paths: list[str] = []
        self.notices: list[str] = []
        self.bits: list[ChosenBits] = []
        self.problems: list[tuple[int, str]] = []  # steps that could not be saved, and why
        self.end: Finished | None = None
        self.error: BaseException | None = None

    def planned(self, plan: Plan) -> None:
        self.plan = plan

    def stepped(self, step: Step) -> None:
        self.steps.append(step)

    def evaluated(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)

    def bits_chosen(self, chosen: ChosenBits) -> None:
        self.bits.append(chosen)

    def noticed(self, line: str) -> None:
        self.notices.append(line)

    def saved(self, step: int, path: str) -> None:
        self.paths.append(path)

    def save_failed(self, step: int, problem: str) -> None:
        self.problems.append((step, problem))

    def finished(self, end: Finished) -> None:
        self.end = end

    def failed(self, error: BaseException) -> None:
        self.error = error


def world_in(group: Any) -> World:
    """A worker of the tests' pool; without a group, the test itself."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    return World(worker=rank, workers=size, device=torch.device("cpu"), group=group, control=Group.of(group))


def settings_for(task: Task, group: Any, **given: Any) -> Settings:
    return resolve({"task": task.name, "workers": world_in(group).workers, **given}, task.defaults, device="cpu")


def run_toy(group: Any, task: Task, running: RunOptions | None = None, **given: Any) -> Recorder:
    """Train on the workers of a group; what the client heard."""
    recorder = Recorder()
    train(task, settings_for(task, group, **given), running or RunOptions(), world_in(group), lambda: recorder)
    return recorder


def train_toy(group: Any, kind: str, running: RunOptions, given: dict[str, Any]) -> Recorder:
    """The same, as a pool calls it."""
    return run_toy(group, ToyTask(kind), running, **given)


def saved_model(directory: Path) -> dict[str, Tensor]:
    """The parameters and buffers of the newest checkpoint."""
    return load(newest(directory), lambda key: key.startswith("model/"))
