"""A task of your own, odd or even digits: samples, model, metric and training defaults.

thinpipe train --task examples.own_task:OddOrEven    # examples/own_task.py, seen from the current folder
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinpipe import Batch, Data, Part, Shape, Source, Task, TaskDefaults, at_most, reject_unused_options, split_fifth


@dataclass(frozen=True)
class Pictures:
    """Samples by number."""

    pixels: Tensor  # [samples, 64]
    labels: Tensor  # [samples], int64

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, *, augment_seed: int | None = None) -> Batch:
        """Return the samples of these numbers; what is random about them may depend on the seed alone."""
        return Batch(inputs=(self.pixels[indices],), labels=self.labels[indices])


class OddOrEven(Task):
    """Is a handwritten digit odd?"""

    name = "odd-or-even"
    summary = "scikit-learn's handwritten digits, odd or even; four linear layers"
    metric = "accuracy"
    defaults = TaskDefaults(
        batch_size=64, chunks=4, epochs=5, optimizer="adamw", lr=3e-3, lr_schedule="linear", warmup=0.1
    )

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Read the samples: on the client alone, so no other worker needs scikit-learn."""
        from sklearn.datasets import load_digits

        reject_unused_options(self.name, source, ("samples",))  # --data and the like would change nothing
        found = load_digits()
        pixels = torch.tensor(found.data, dtype=torch.float32) / 16
        whole = Pictures(pixels, torch.tensor(found.target) % 2)
        train, validation = (Part(whole=whole, indices=numbers) for numbers in split_fifth(len(whole)))
        return Data(train=at_most(train, source.samples), validation=validation, classes=2), Shape(classes=2)

    def build(self, shape: Shape, source: Source) -> nn.Module:
        """Build the model: on every worker. The children of an nn.Sequential are the units that stages are made of."""
        hidden = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(2)]
        return nn.Sequential(nn.Sequential(nn.Linear(64, 128), nn.ReLU()), *hidden, nn.Linear(128, shape.classes))
