"""Backends: what they can do is declared; one that nobody declared is refused and never replaced by another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm.counting import create_groups, join_unannounced, run_counted
from tests.pool import Pool
from tests.train.tasks.written import write_language_model
from tests.train.toy import train_toy
from thinpipe.comm.backend import Capabilities, capabilities, register_backend
from thinpipe.launch.workers import run_workers
from thinpipe.train.running import RunOptions

UNKNOWN = "thinpipe does not know what backend 'unannounced' can do, and never replaces it by another; take one of"


def test_a_backend_from_outside_carries_everything_alone(pool: Pool, tmp_path: Path) -> None:
    write_language_model(tmp_path, "a client keeps the first and the last layers of a model. " * 20)
    client, server = run_workers(run_counted, tmp_path, workers=2, backend="counting")
    trained = pool.run(train_toy, 2, "plain", RunOptions(), {})[0].end
    assert client.result["_train"] == trained.parameters_sha256
    assert client.result["_evaluate"] == pytest.approx(trained.validation_loss, rel=1e-6)
    assert [len(tokens) for tokens in client.result["_generate"]] == [4]
    for phase in ("_train", "_evaluate", "_generate"):
        mine, theirs = client.counts[phase], server.counts[phase]
        assert mine["send"] == theirs["recv"] > 0
        assert mine["recv"] == theirs["send"] > 0
        assert mine["allgather"] == theirs["allgather"] > 0
    assert client.groups == server.groups == 1  # no group of another backend for statistics, evaluation or gradients
    # The control channel, before the workers joined: one listening socket of the client, one connection to it.
    assert client.opened == ["socket.bind"]
    assert server.opened == ["socket.connect"]
    assert client.new_sockets == server.new_sockets == 0


def test_new_groups_do_not_bypass_encryption() -> None:
    for names, error, seen in run_workers(create_groups, workers=2, backend="counting"):
        assert names == ["counting", "counting"]
        assert "backend 'counting' encrypts, and a group of 'gloo' would send in the clear" in error
        assert seen == "gloo was created"  # the check above sees it


def test_a_backend_that_is_not_announced_is_refused() -> None:
    assert all(error.startswith(UNKNOWN) for error in run_workers(join_unannounced, workers=2, backend="unannounced"))


def test_a_backend_is_announced_once() -> None:
    gloo = capabilities("gloo")
    register_backend("gloo", gloo)
    with pytest.raises(ValueError, match="backend 'gloo' is registered with other capabilities"):
        register_backend("gloo", Capabilities(tags=False, host_memory=True, short_receive=True, preconnected=True))
    assert capabilities("gloo") == gloo
