"""How far a run is: the numbers that go on counting when it is taken up again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class Progress:
    """Of the whole run, as the client knows it; saved with every checkpoint."""

    step: int = 0  # done
    steps: int = 0  # of the whole run
    epoch_loss: float = 0.0  # sum over the samples of the epoch under way
    epoch_correct: int = 0
    epoch_samples: int = 0
    train_loss: float = float("nan")  # of the last epoch evaluated, and so on
    validation_loss: float = float("nan")
    metric: float = float("nan")
    best_metric: float = float("-inf")
    metric_name: str = ""
    parameters_sha256: str = ""  # set with the last checkpoint

    @property
    def is_complete(self) -> bool:
        return self.step >= self.steps

    def count(self, *, loss: float, correct: int, samples: int) -> None:
        self.step += 1
        self.epoch_loss += loss * samples
        self.epoch_correct += correct
        self.epoch_samples += samples

    def evaluated(self, *, validation_loss: float, metric: float) -> None:
        self.train_loss = self.epoch_loss / max(self.epoch_samples, 1)
        self.validation_loss, self.metric = validation_loss, metric
        self.best_metric = max(self.best_metric, metric)

    def begin_epoch(self) -> None:
        self.epoch_loss, self.epoch_correct, self.epoch_samples = 0.0, 0, 0
