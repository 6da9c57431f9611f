"""Activation memory of stages: the bytes that torch then has in memory, within the limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.pool import Pool
from tests.train.toy import FEATURES, ToyTask, train_toy
from thinpipe.options import OptionError
from thinpipe.pipeline.order import make_order
from thinpipe.train.engines.plan import Holding, describe_held, kept_bytes, peak_activation_bytes
from thinpipe.train.engines.world import SetupError
from thinpipe.train.resolve import resolve
from thinpipe.train.running import RunOptions
from thinpipe.train.shaping import parse_link

KB = 4 * 256  # a row of 256 floats


def test_inputs_outputs_and_intermediates_are_counted_once() -> None:
    module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.Flatten())
    x = torch.zeros(10, 256, requires_grad=True)
    # The input; what the ReLU returned, which the next layer keeps too; the output, of which Flatten returns a view.
    assert kept_bytes(module, [x], {}, recompute=False) == 3 * 10 * KB
    assert kept_bytes(module, [x], {}, recompute=True) == 2 * 10 * KB


def test_nothing_is_changed() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(8, 4)
    state = torch.random.get_rng_state()
    kept_bytes(module, [x], {}, recompute=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("order", "most"),
    [
        ("gpipe", 8 * 10),  # the first stage of all chunks; of the last never more than one
        ("1f1b", 3 * 10),
        ("1f1b:5", 5 * 10),
    ],
)
def test_the_worker_that_keeps_most(order: str, most: int) -> None:
    assert peak_activation_bytes(make_order(order, [0, 1, 2], 8), {0: 10, 1: 10, 2: 10}) == most


def test_stages_of_one_worker_add_up() -> None:
    assert peak_activation_bytes(make_order("gpipe", [0, 1, 0], 4), {0: 10, 1: 1, 2: 100}) == 4 * 10 + 100


GIVEN: dict[str, Any] = {"schedule": "1f1b", "chunks": 9, "client_layers": (1, 2)}
WIDE = parse_link("10mbit,25ms")


def limited(pool: Pool, limit: int | None) -> Any:
    return pool.run(train_toy, 2, "batchnorm", RunOptions(link=WIDE, memory_limit=limit), GIVEN)[0]


def test_fewer_chunks_are_in_flight_with_little_memory(pool: Pool) -> None:
    # Two rows a chunk. The server, with three units, keeps its input and of each unit what batch norm and tanh return.
    unit = 2 * 4 * FEATURES
    assert limited(pool, None).plan.schedule == "1f1b:9"
    assert limited(pool, 1 << 30).plan.schedule == "1f1b:9"
    short = limited(pool, 60 * unit)
    name, _, most = short.plan.schedule.partition(":")
    assert name == "1f1b"
    assert 3 <= int(most or 3) < 9
    as_given = pool.run(train_toy, 2, "batchnorm", RunOptions(), GIVEN | {"schedule": short.plan.schedule})[0]
    assert as_given.end.parameters_sha256 == short.end.parameters_sha256


def refused(group: Any, limit: int) -> str:
    with pytest.raises(SetupError) as error:
        train_toy(group, "plain", RunOptions(memory_limit=limit), GIVEN | {"schedule": "gpipe"})
    return str(error.value)


def test_too_little_memory_is_an_error_on_all_workers(pool: Pool) -> None:
    first, second = pool.run(refused, 2, 1000)
    assert first == second
    assert first.startswith("a worker keeps 73.73 kB of chunks in flight, and memory_limit allows 1 kB. ")


def test_one_process_has_no_chunks_in_flight() -> None:
    settings = resolve({"parallel": "none"}, ToyTask.defaults, device="cpu")
    with pytest.raises(OptionError, match="memory_limit"):
        RunOptions(memory_limit=1000).check_with(settings)


def test_the_units_of_a_worker_in_one_line() -> None:
    def holding(stage: int, worker: int, first: int, *names: str) -> Holding:
        return Holding(
            stage=stage,
            worker=worker,
            first_unit=first,
            units=len(names),
            unit_names=names,
            parameters=1000 * len(names),
            trained=0,
        )

    holdings = [holding(0, 0, 0, "stem"), holding(1, 1, 1, "layer.0", "layer.1"), holding(2, 0, 3, "head")]
    assert describe_held(holdings, 1) == "worker 1 holds units 1 to 2 (layer.0 to layer.1), 2,000 parameters"
    assert describe_held(holdings, 0) == (
        "worker 0 holds units 0 (stem), 1,000 parameters and 3 (head), 1,000 parameters"
    )
