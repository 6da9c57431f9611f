"""What a prediction is worth: accuracy and Matthews correlation, from predicted and true classes."""

from __future__ import annotations

import torch
from torch import Tensor

from thinpipe.workloads.task import Metric


def score(metric: Metric, predictions: Tensor, labels: Tensor) -> float:
    """The metric of these predictions; both tensors hold class numbers, [N]."""
    if predictions.shape != labels.shape or predictions.dim() != 1 or not len(labels):
        raise ValueError(
            f"predictions and labels are class numbers of the same samples, at least one; "
            f"got shapes {tuple(predictions.shape)} and {tuple(labels.shape)}"
        )
    return {"accuracy": accuracy, "matthews": matthews}[metric](confusion(predictions, labels))


def confusion(predictions: Tensor, labels: Tensor) -> Tensor:
    """How often what was taken for what: [true class, predicted class]. Those of parts of a data set add up."""
    classes = int(torch.maximum(predictions.max(), labels.max())) + 1
    return torch.bincount(labels * classes + predictions, minlength=classes**2).view(classes, classes)


def accuracy(counts: Tensor) -> float:
    """The part of the samples on the diagonal."""
    return (counts.diagonal().sum() / counts.sum()).item()


def matthews(counts: Tensor) -> float:
    """Correlation between prediction and truth, -1 to 1; 0 if either is always the same class."""
    counts = counts.double()
    true, predicted, total = counts.sum(1), counts.sum(0), counts.sum()
    covariance = counts.diagonal().sum() * total - true @ predicted
    variance = (total**2 - true @ true) * (total**2 - predicted @ predicted)
    return (covariance / variance.sqrt()).item() if variance > 0 else 0.0
