"""The part of one replica in the tests of the hook."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinpipe
from thinpipe import ddp
from thinpipe.codecs.tile import Tile
from thinpipe.ddp import DDPState

SIZES = {"0.weight": 24 * 48, "0.bias": 48, "2.weight": 48 * 40, "2.bias": 40}


def wrapped(group: Any, hook: str | None, **options: Any) -> tuple[DistributedDataParallel, DDPState | None]:
    """The same small model on every replica, in two or more buckets."""
    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 40)).to(dtype)
    parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.004)
    if hook is None:
        return parallel, None
    state = thinpipe.ddp_state(hook, process_group=group, **options)
    parallel.register_comm_hook(state, thinpipe.ddp_hook)
    return parallel, state


def backward(model: DistributedDataParallel, step: int, rank: int) -> None:
    """One backward pass on data that no other step and replica has."""
    model.zero_grad()
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()


def gradients(model: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}


def run(group: Any, hook: str | None, steps: int, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The gradients after each step."""
    model, _ = wrapped(group, hook, **options)
    seen = []
    for step in range(steps):
        backward(model, step, group.rank())
        seen.append(gradients(model))
    return seen


def count(group: Any, hook: str, steps: int) -> tuple[int, int, int]:
    model, state = wrapped(group, hook)
    assert state is not None
    for step in range(steps):
        backward(model, step, group.rank())
    return state.steps, state.gradient_bytes, state.wire_bytes


def feed_back(group: Any, hook: str, steps: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """For every parameter: the sum of what came out, of what should have, and of what all replicas still owe."""
    model, state = wrapped(group, hook)
    plain, _ = wrapped(group, None)
    assert state is not None
    out = {name: torch.zeros_like(p) for name, p in plain.module.named_parameters()}
    right = {name: torch.zeros_like(p) for name, p in plain.module.named_parameters()}
    for step in range(steps):
        for each, total in ((model, out), (plain, right)):
            backward(each, step, group.rank())
            for name, gradient in gradients(each).items():
                total[name] += gradient
    owed = {}
    for name, parameter in model.module.named_parameters():
        error = state.memory(parameter).error
        mean = torch.zeros(parameter.numel()) if error is None else error / group.size()
        torch.distributed.all_reduce(mean, group=group)
        owed[name] = mean.view(parameter.shape)
    return {name: (out[name].detach(), right[name].detach(), owed[name]) for name in out}


def resume(group: Any, hook: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of a third step: without a break, saved and restored before it, and with nothing remembered."""
    model, state = wrapped(group, hook)
    assert state is not None
    for step in range(2):
        backward(model, step, group.rank())
    saved = state.state_dict(model)
    backward(model, 2, group.rank())
    restored, restored_state = wrapped(group, hook)
    assert restored_state is not None
    restored_state.load_state_dict(saved, restored.module)
    backward(restored, 2, group.rank())
    forgot, _ = wrapped(group, hook)
    backward(forgot, 2, group.rank())
    return gradients(model), gradients(restored), gradients(forgot)


def rounding_keys(group: Any, seed: int) -> list[int]:
    """Those of the compressed gradients of three steps: DDP regroups its buckets after the first."""
    model, state = wrapped(group, "tile:4+sr", seed=seed)
    assert state is not None
    keys: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        encode = Tile.encode_floats
        patch.setattr(Tile, "encode_floats", lambda *args: keys.append(args[-1]) or encode(*args))
        for step in range(3):
            backward(model, step, group.rank())
    return keys


def decodes(group: Any, error_feedback: bool) -> int:
    """Return how often this replica decodes a message of the larger weight in one step."""
    model, _ = wrapped(group, "tile:4", error_feedback=error_feedback)
    with mock.patch.object(Tile, "decode_floats", autospec=True, side_effect=Tile.decode_floats) as decode:
        backward(model, 0, group.rank())
    return sum(call.args[2].numel() == SIZES["2.weight"] for call in decode.call_args_list)


def refuse(group: Any, change: dict[str, Any]) -> str:
    """Return the error for the state of another model."""
    model, state = wrapped(group, "uniform:8")
    assert state is not None
    backward(model, 0, group.rank())
    try:
        state.load_state_dict(state.state_dict(model) | change, model)
    except ValueError as error:
        return str(error)
    return ""


def overflow(group: Any) -> tuple[bool, bool]:
    """Return whether all replicas see an infinite gradient of one, and whether the next step is finite."""
    model, _ = wrapped(group, "uniform:8")
    x = torch.ones(4, 24)
    x[0, 0] = torch.inf if group.rank() == 1 else 1.0
    model(x).square().mean().backward()
    seen = not gradients(model)["0.weight"].isfinite().all()
    backward(model, 0, group.rank())
    return seen, all(bool(gradient.isfinite().all()) for gradient in gradients(model).values())


def threads_at_the_end(group: Any) -> list[str]:
    """Return the states of gloo's threads at the end of a program that has used the hook."""
    model, _ = wrapped(group, "uniform:8")
    backward(model, 0, group.rank())
    ddp._let_go()
    return list(ddp._gloo_states())


def without_a_peer(group: Any) -> str:
    """Return DDP's error if an exchange fails because another replica is gone."""
    model, _ = wrapped(group, "uniform:8")
    failed: torch.futures.Future[Any] = torch.futures.Future()
    failed.set_exception(RuntimeError("Connection closed by peer"))
    with mock.patch.object(ddp.dist, "all_gather", return_value=SimpleNamespace(get_future=lambda: failed)):
        try:
            backward(model, 0, group.rank())
        except RuntimeError as error:
            return str(error)
    return "nothing"
