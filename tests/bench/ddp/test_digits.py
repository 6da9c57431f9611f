"""Compressed gradients train as well as uncompressed ones, for a quarter of the bytes; the claim can fail."""

import pytest
from digits_replica import compare_on_replica

from thinpipe.bench.ddp.digits import checks, mean_table
from thinpipe.measure.report import plain_text


def row(codec, seed, accuracy_percent):
    figures = {"gradient_bytes": 8_000_000, "wire_bytes": 2_000_000, "wire_ratio": 0.25}
    return {"codec": codec, "seed": seed, "accuracy_percent": accuracy_percent, **figures}


def test_a_short_training_on_four_replicas(pool):
    record, *others = pool.run(compare_on_replica, 4, ("none", "uniform:8"))
    assert others == [None] * 3
    none, uniform = record.rows
    assert none["accuracy_percent"] > 90
    assert uniform["accuracy_percent"] > 90
    assert none["loss"] != uniform["loss"], "nothing was lost: was it compressed?"
    assert none["wire_ratio"] == pytest.approx(1, abs=0.001)  # parts of a message start at round addresses
    assert uniform["wire_ratio"] == pytest.approx(0.25, abs=0.005)
    assert record.config["replicas"] == 4


@pytest.mark.parametrize(("accuracies", "passed"), [((97.5, 97.0), True), ((97.5, 96.0), False)])
def test_a_codec_may_cost_a_point_on_the_mean(accuracies, passed):
    rows = [row("none", seed, 98.0) for seed in (0, 1)]
    rows += [row("uniform:8", seed, accuracy) for seed, accuracy in enumerate(accuracies)]
    (check,) = checks(rows)
    assert check.passed is passed


def test_without_a_baseline_there_is_no_claim():
    assert list(checks([row("uniform:8", 0, 50.0)])) == []


def test_the_table_has_mean_and_spread():
    text = plain_text(mean_table([row("uniform:8", 0, 97.0), row("uniform:8", 1, 99.0)]))
    assert text.splitlines()[-1].split() == ["uniform:8", "98.00", "±", "1.41", "97.00", "2.00", "0.250"]
