"""Backends: what they can do is declared; one that nobody declared is refused and never replaced by another."""

from __future__ import annotations

import pytest

from tests.comm.counting import join_unannounced, train_counted
from tests.pool import Pool
from tests.train.toy import train_toy
from thinpipe.comm.backend import Capabilities, capabilities, register_backend
from thinpipe.launch.workers import run_workers
from thinpipe.train.running import RunOptions

UNKNOWN = "thinpipe does not know what backend 'unannounced' can do, and never replaces it by another; take one of"


def test_a_backend_from_outside_carries_a_whole_run_alone(pool: Pool) -> None:
    (client, counts, groups), (_, server_counts, server_groups) = run_workers(
        train_counted, workers=2, backend="counting"
    )
    assert client == pool.run(train_toy, 2, "plain", RunOptions(), {})[0].end.parameters_sha256
    assert groups == server_groups == 1  # no group of another backend for statistics, evaluation or gradients
    assert counts["send"] == server_counts["recv"] > 0
    assert counts["recv"] == server_counts["send"] > 0
    assert counts["allgather"] == server_counts["allgather"] > 0


def test_a_backend_that_is_not_announced_is_refused() -> None:
    assert all(error.startswith(UNKNOWN) for error in run_workers(join_unannounced, workers=2, backend="unannounced"))


def test_a_backend_is_announced_once() -> None:
    gloo = capabilities("gloo")
    register_backend("gloo", gloo)
    with pytest.raises(ValueError, match="backend 'gloo' is registered with other capabilities"):
        register_backend("gloo", Capabilities(tags=False, host_memory=True, short_receive=True, preconnected=True))
    assert capabilities("gloo") == gloo
