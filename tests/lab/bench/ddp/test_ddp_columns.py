"""Samples become the percentiles that numpy finds; groups have the sizes and names they should."""

import numpy as np
import pytest

from thinpipe.lab.bench.ddp.ddp_columns import (
    PERCENTILES,
    ReplicaGroup,
    ReplicaTimes,
    group_name,
    group_sizes,
    make_row,
)


def test_percentiles_are_numpys_over_the_slowest_replica_of_each_iteration():
    random = np.random.default_rng(0)
    samples_s = random.gamma(2.0, 0.05, size=(3, 40))
    replicas = [ReplicaTimes(samples_s=tuple(each), gradient_bytes=4, wire_bytes=1) for each in samples_s.tolist()]
    row = make_row("m", ReplicaGroup(name="1M/3G", size=3, ddp=True), 32, "cpu", replicas)
    slowest = samples_s.max(axis=0)
    assert row["samples_s"] == slowest.tolist()
    for p in PERCENTILES:
        assert row[f"p{p}_s"] == np.percentile(slowest, p)
        assert row[f"p{p}_examples_per_s"] == 32 / np.percentile(slowest, p)
    assert row["p50_s"] < row["p75_s"] < row["p90_s"] < row["p95_s"] < max(row["samples_s"])


@pytest.mark.parametrize(
    ("world", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_groups_double_up_to_all(world, sizes):
    assert group_sizes(world) == sizes


@pytest.mark.parametrize(
    ("machines", "name"), [([0], "1M/1G"), ([0] * 8, "1M/8G"), ([0] * 8 + [1] * 8, "2M/8G"), ([0, 1, 2], "3M/1G")]
)
def test_groups_are_named_by_machines_and_replicas(machines, name):
    assert group_name(machines, "G") == name
