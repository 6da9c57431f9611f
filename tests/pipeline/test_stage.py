"""Features of a stage: posting ahead, reusing buffers, several tensors, evaluation, batch norm."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from tests.pipeline.models import batch, cut, reference, seeded
from tests.pipeline.pipelines import make, run_step, twins
from tests.pool import Pool
from thinpipe.codecs.tile import Tile
from thinpipe.links.message import CHECKSUM_BYTES
from thinpipe.links.send import SendLink
from thinpipe.pipeline import ClientServerSchedule, LinearSchedule, PipelineStage

CHUNKS = 4


def log_calls(patch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every receive posted, every send, every chunk computed: what, and the address of what travels."""
    calls: list[tuple[str, int]] = []
    irecv, isend, forward = dist.irecv, dist.isend, PipelineStage.forward_maybe_with_nosync

    def logged(name: str, function: Any) -> Any:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, first.data_ptr() if isinstance(first, Tensor) else 0))
            return function(first, *args, **kwargs)

        return call

    patch.setattr(dist, "irecv", logged("recv", irecv))
    patch.setattr(dist, "isend", logged("send", isend))
    patch.setattr(PipelineStage, "forward_maybe_with_nosync", logged("compute", forward))
    return calls


def two_logged_steps(group: Any, name: str, spec: str) -> list[list[tuple[str, int]]]:
    worker, workers = group.rank(), group.size()
    module = cut(seeded(4, 256), workers)[worker]
    stage = PipelineStage(module, worker, workers, "cpu", group=group, forward=spec, backward=spec)
    schedule = getattr(pipelining, name)(stage, CHUNKS, nn.functional.mse_loss)
    x, y = batch(width=256)
    run_step([stage], schedule, x, y)  # the first one also sends shapes
    steps = []
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            calls = log_calls(patch)
            run_step([stage], schedule, x, y)
        steps.append(calls)
    return steps


@pytest.mark.parametrize("spec", ["none", "uniform:8"])
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_receives_are_posted_before_the_first_computation_into_the_same_buffers(
    pool: Pool, name: str, spec: str
) -> None:
    for worker, steps in enumerate(pool.run(two_logged_steps, 3, name, spec)):
        links = 2 if worker == 1 else 1
        for calls in steps:
            kinds = [kind for kind, _ in calls]
            assert kinds[: links * CHUNKS] == ["recv"] * links * CHUNKS
            assert kinds.count("recv") == kinds.count("send") == links * CHUNKS
            assert kinds.count("compute") == CHUNKS
        received = [{address for kind, address in calls if kind == "recv"} for calls in steps]
        assert received[0] == received[1]
        if spec != "none":
            sent = [{address for kind, address in calls if kind == "send"} for calls in steps]
            assert sent[0] == sent[1]
            assert len(sent[0]) <= links * 4


class Masked(nn.Module):
    """A unit as in a transformer: a hidden state and the mask it came with, which has no gradient."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x) * mask, mask


class Unmask(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask.sum()


def with_mask(group: Any, post_ahead: bool) -> tuple[list[float], list[tuple[int, int]]]:
    worker, width = group.rank(), 256
    modules = [Masked(unit) for unit in seeded(3, width)]
    modules[-1] = nn.Sequential(modules[-1])
    modules[-1].forward = lambda x, mask: Unmask()(*modules[-1][0](x, mask))
    stage = PipelineStage(
        modules[worker], worker, 3, "cpu", group=group, forward="uniform:8", backward="uniform:8", post_ahead=post_ahead
    )
    schedule = LinearSchedule(stage, CHUNKS, nn.functional.mse_loss)
    x, y = batch(width=width)
    mask = (torch.arange(width) % 3 > 0).long().expand(len(x), width).contiguous()
    errors = []
    for _ in range(2):
        stage.submod.zero_grad()
        schedule.step(*([x, mask] if stage.is_first else []), target=y if stage.is_last else None)
        plain = seeded(3, width)
        hidden = x
        for unit in plain:
            hidden = unit(hidden) * mask
        nn.functional.mse_loss(hidden + mask[0].sum() * (len(x) // CHUNKS), y).backward()
        mine = list(stage.submod.parameters())
        errors += [
            float((p.grad - q.grad).norm() / q.grad.norm())
            for p, q in zip(mine, plain[worker].parameters(), strict=True)
        ]
    return errors, [(link.counters().tensor_bytes, link.counters().wire_bytes) for link in stage.links]


@pytest.mark.parametrize("post_ahead", [True, False], ids=["ahead", "in order"])
def test_masks_travel_alongside_hidden_states_as_bits(pool: Pool, post_ahead: bool) -> None:
    hidden, mask, header = 32 * 256 * 4, 32 * 256 * 8, (16 + CHECKSUM_BYTES) * CHUNKS
    packed = mask // 64 + (9 + CHECKSUM_BYTES) * CHUNKS
    for errors, sizes in pool.run(with_mask, 3, post_ahead):
        assert 1e-6 < max(errors) < 0.2
        for tensor_bytes, wire_bytes in sizes:
            forward = tensor_bytes == 2 * (hidden + mask)
            assert forward or tensor_bytes == 2 * hidden  # gradients of masks do not travel
            assert wire_bytes == 2 * (hidden // 4 + header + (packed if forward else 0))


def raw_or_not(group: Any, width: int) -> list[tuple[int, int]]:
    stages, schedule = make(group, "linear", "gpipe", CHUNKS, seeded(2, width), forward="uniform:8")
    run_step(stages, schedule, *batch(width=width))
    return [(link.counters().tensor_bytes, link.counters().wire_bytes) for link in stages[0].links]


def test_small_tensors_travel_raw(pool: Pool) -> None:
    forward, backward = pool.run(raw_or_not, 2, 127)[0]  # 8 rows of 127 floats: 4064 bytes a message
    assert forward == backward == (32 * 127 * 4, 32 * 127 * 4 + CHUNKS * CHECKSUM_BYTES)
    forward, backward = pool.run(raw_or_not, 2, 128)[0]
    assert forward == (32 * 128 * 4, 32 * 128 + (16 + CHECKSUM_BYTES) * CHUNKS)


def warnings_of(group: Any, forward: str, backward: str, width: int) -> list[str]:
    """Return what two steps and an evaluation warn of on this worker."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"forward": forward, "backward": backward}
        stages, schedule = make(group, "linear", "gpipe", CHUNKS, seeded(2, width), **options)
        x, y = batch(width=width)
        run_step(stages, schedule, x, y)
        schedule.eval(*([x] if stages[0].is_first else []), target=y if stages[0].is_last else None)
        run_step(stages, schedule, x, y)
    return [str(each.message) for each in caught if "compressed" in str(each.message)]


def test_a_sender_warns_once_if_nothing_is_compressed(pool: Pool) -> None:
    first, last = pool.run(warnings_of, 2, "uniform:8", "uniform:8", 127)
    assert len(first) == len(last) == 1
    assert "nothing is compressed on the forward link from stage 0 to stage 1: " in first[0]
    assert "the largest tensor of a chunk has 4064 bytes, and uniform:8 encodes tensors of 4096 bytes" in first[0]
    assert "backward link from stage 1 to stage 0" in last[0]
    assert pool.run(warnings_of, 2, "uniform:8", "uniform:8", 128) == [[], []]
    assert pool.run(warnings_of, 2, "none", "none", 127) == [[], []]


def evaluate_between(group: Any, layout: str) -> None:
    """Train, evaluate, train: evaluation returns outputs, leaves gradients alone, and training goes on as before."""
    piped, plain = seeded(), seeded()
    stages, schedule = make(group, layout, "1f1b", CHUNKS, piped)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    x, y = batch()
    for _ in range(2):
        reference(plain, x, y, CHUNKS)
        run_step(stages, schedule, x, y)
        before = [p.grad.clone() for stage in stages for p in stage.submod.parameters()]
        with torch.no_grad():
            output = schedule.eval(*([x] if first else []), target=y if last else None)
        if last:
            torch.testing.assert_close(output, nn.Sequential(*plain)(x), rtol=1e-5, atol=1e-6)
        after = [p.grad for stage in stages for p in stage.submod.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        for stage in stages:
            for p, q in twins(stage.submod, piped, plain):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
        for module in (*piped, *plain):
            module.zero_grad()


@pytest.mark.parametrize("layout", ["linear", "client-server"])
def test_evaluation_between_training_steps(pool: Pool, layout: str) -> None:
    pool.run(evaluate_between, 3, layout)


def two_pipelines(group: Any) -> None:
    """Steps of two pipelines of one process in turn, each with two stages on the client."""
    piped, plain = [seeded(seed=0), seeded(seed=1)], [seeded(seed=0), seeded(seed=1)]
    pipelines = [make(group, "client-server", "1f1b", CHUNKS, units) for units in piped]
    for step in range(2):
        x, y = batch(seed=step)
        for mine, alone, (stages, schedule) in zip(piped, plain, pipelines, strict=True):
            reference(alone, x, y, CHUNKS)
            run_step(stages, schedule, x, y)
            for stage in stages:
                for p, q in twins(stage.submod, mine, alone):
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
            for unit in (*mine, *alone):
                unit.zero_grad()


def test_two_pipelines_in_one_process(pool: Pool) -> None:
    pool.run(two_pipelines, 3)


def other_shape(group: Any) -> str:
    """A second step with fewer rows; only the sender runs it, the receiver would wait for what never comes."""
    stages, schedule = make(group, "linear", "gpipe", CHUNKS, seeded(2))
    x, y = batch(32)
    run_step(stages, schedule, x, y)
    link = next(iter(stages[0].links))
    try:
        if isinstance(link, SendLink):
            link.send(0, [x[:4]])
    except ValueError as error:
        return str(error)
    return ""


def test_other_shape_is_refused(pool: Pool) -> None:
    message = pool.run(other_shape, 2)[0]
    assert "forward link from stage 0 to stage 1 was set up for float32[8, 32]" in message
    assert "chunk 0 is float32[4, 32]" in message


def link_memory(group: Any) -> None:
    """The basis that `power` starts from is saved with the links, and a new stage goes on from it."""
    piped = seeded(2, 256)
    stages, schedule = make(group, "linear", "gpipe", 1, piped, forward="power:2", backward="power:2")
    for step in range(3):
        run_step(stages, schedule, *batch(width=256, seed=step))
    saved = stages[0].link_state_dict()
    mine = "forward" if group.rank() == 0 else "backward"
    assert set(saved) == {mine}
    assert saved[mine]
    restored, _ = make(group, "linear", "gpipe", 1, piped, forward="power:2", backward="power:2")
    assert not restored[0].link_state_dict()[mine]
    restored[0].load_link_state_dict(saved)
    again = restored[0].link_state_dict()
    assert again[mine].keys() == saved[mine].keys()
    assert all(torch.equal(again[mine][key], saved[mine][key]) for key in saved[mine])


def test_links_save_and_load_codec_state(pool: Pool) -> None:
    pool.run(link_memory, 2)


def keys_of_messages(group: Any, seed: int) -> list[int]:
    """The keys with which this worker encodes what it sends in three steps; the last one of a stage that goes on."""
    keys: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        encode = Tile.encode_floats
        patch.setattr(Tile, "encode_floats", lambda *args: keys.append(args[-1]) or encode(*args))
        piped, options = seeded(4, 256), {"forward": "tile:4+sr", "backward": "tile:4+sr", "seed": seed}
        stages, schedule = make(group, "client-server", "gpipe", CHUNKS, piped, **options)
        for step in range(2):
            run_step(stages, schedule, *batch(width=256, seed=step))
        resumed, schedule = make(group, "client-server", "gpipe", CHUNKS, piped, **options)
        for before, after in zip(stages, resumed, strict=True):
            after.load_link_state_dict(before.link_state_dict())
        run_step(resumed, schedule, *batch(width=256, seed=2))
    return keys


def test_no_two_messages_are_rounded_alike(pool: Pool) -> None:
    """Three workers, three links in two directions, three steps, four chunks."""
    first, again, other = ([k for keys in pool.run(keys_of_messages, 3, seed) for k in keys] for seed in (1, 1, 2))
    assert len(first) == 3 * 2 * 3 * CHUNKS
    assert len({*first, *other}) == 2 * len(first)
    assert first == again


def wrong_schedules(group: Any) -> list[str]:
    module, errors = nn.Identity(), []
    stage = PipelineStage(module, group.rank(), 2, "cpu", group=group)
    for schedule in (lambda: ClientServerSchedule([stage], 4), lambda: LinearSchedule(stage, 4, order="zigzag")):
        try:
            schedule()
        except ValueError as error:
            errors.append(str(error))
    try:
        wrong = PipelineStage(module, 0, 3, "cpu", group=group)
        ClientServerSchedule([wrong], 4)
    except ValueError as error:
        errors.append(str(error))
    return errors


def test_schedules_reject_missing_stages(pool: Pool) -> None:
    counts, order, stages = pool.run(wrong_schedules, 2)[0]
    assert "got 2 workers and 2 stages" in counts
    assert "an order is gpipe, 1f1b, or 1f1b:N with at most N chunks in flight; got 'zigzag'" in order
    assert "worker 0 of 2 has stages [0, 2] of 3, in this order, got [0]" in stages


def gpu_through_gloo(group: Any) -> str:
    with pytest.raises(ValueError, match="needs its shapes") as caught:
        PipelineStage(nn.Linear(4, 4), group.rank(), 2, "cuda", group=group)
    return str(caught.value)


def test_gpu_stages_on_gloo_need_their_shapes(pool: Pool) -> None:
    assert "input_args and output_args" in pool.run(gpu_through_gloo, 2)[0]
