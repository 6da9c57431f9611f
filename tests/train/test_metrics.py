"""Metrics, held against scikit-learn's."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import accuracy_score, matthews_corrcoef

from thinpipe.train.checkpoints.manifest import Progress
from thinpipe.train.metrics import perplexity, score


@pytest.mark.parametrize("classes", [2, 5])
def test_they_are_scikit_learns(classes: int) -> None:
    labels = torch.randint(classes, (200,))
    predictions = torch.where(torch.rand(200) < 0.6, labels, torch.randint(classes, (200,)))
    assert score("accuracy", predictions, labels) == pytest.approx(accuracy_score(labels, predictions))
    assert score("matthews", predictions, labels) == pytest.approx(matthews_corrcoef(labels, predictions))


def test_a_constant_predictor_correlates_with_nothing() -> None:
    labels = torch.tensor([0, 1, 1, 0, 1])
    assert score("matthews", torch.ones(5, dtype=torch.int64), labels) == 0.0
    assert score("matthews", labels, torch.ones(5, dtype=torch.int64)) == 0.0


def test_the_best_and_the_worst() -> None:
    labels = torch.tensor([0, 1, 1, 0])
    assert (score("matthews", labels, labels), score("matthews", 1 - labels, labels)) == (1.0, -1.0)


def test_nothing_has_no_metric() -> None:
    with pytest.raises(ValueError, match="at least one"):
        score("accuracy", torch.tensor([]), torch.tensor([]))


@pytest.mark.parametrize(("name", "best"), [("accuracy", 5.0), ("perplexity", 2.0)])
def test_the_best_is_the_highest_or_the_lowest_by_metric(name, best):
    progress = Progress(metric_name=name)
    for value in (3.0, 5.0, 2.0, 4.0):
        progress.evaluated(validation_loss=0.0, metric=value)
    assert (progress.metric, progress.best_metric) == (4.0, best)


def test_the_training_loss_of_an_epoch_is_the_mean_over_its_own_samples():
    progress = Progress()
    for losses in ((4.0, 1.0), (3.0, 2.0)):
        for loss, samples in zip(losses, (2, 4), strict=True):
            progress.count(loss=loss, correct=1.0, samples=samples, wire_bytes=10)
        progress.evaluated(validation_loss=0.0, metric=0.0)
        assert progress.train_loss == pytest.approx((2 * losses[0] + 4 * losses[1]) / 6)
        progress.begin_epoch()
    assert (progress.step, progress.wire_bytes) == (4, 40)


def test_perplexity_of_a_model_that_knows_nothing_is_the_number_of_tokens():
    assert perplexity(math.log(300)) == pytest.approx(300)
    assert perplexity(1e6) == math.inf
