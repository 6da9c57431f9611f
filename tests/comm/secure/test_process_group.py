"""The backend ``tls``: what arrives equals what was sent, and all results equal those of gloo, bit for bit."""

from __future__ import annotations

import multiprocessing
import random
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B

from tests.comm.secure import groups
from tests.comm.secure.groups import joined
from tests.comm.secure.network import throwaway_tls
from tests.ddp import replica
from tests.pipeline.models import batch, cut, seeded
from tests.pipeline.pipelines import make, run_step
from tests.pool import Pool
from thinpipe.codecs.recipes import directions
from thinpipe.comm.backend import CPU, capabilities_of, new_group
from thinpipe.comm.errors import LinkError
from thinpipe.comm.group import Group, link_errors
from thinpipe.comm.secure.mesh import Mesh
from thinpipe.comm.secure.process_group import BACKEND, use
from thinpipe.pipeline import PipelineStage

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int64]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    throwaway_tls(tmp_path)
    return tmp_path


def tensors() -> list[Tensor]:
    """Tensors of all kinds that are sent."""
    made = [torch.randint(0, 2, (5, 3)).to(dtype) for dtype in DTYPES]
    made += [torch.randn(40, 30).t(), torch.randn(9, 8)[::2, ::3]]
    made += [torch.randn(()), torch.empty(0), torch.empty(0, 3), torch.randn(7, requires_grad=True)]
    return [*made, *(torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1, 262_080, 262_081, 100_000_000))]


def exchange(gloo: Any, folder: Path) -> None:
    with joined(gloo, folder) as here:
        rank, group = gloo.rank(), here.group
        for index, sent in enumerate(tensors()):  # the same on both workers: they have the same seed
            received = torch.zeros_like(sent.detach())
            if rank == 0:
                dist.send(sent, group=group, group_dst=1, tag=index)
                dist.recv(received, group=group, group_src=1)
            else:
                assert dist.recv(received, group=group, group_src=0, tag=index) == 0
                dist.send(sent, group=group, group_dst=0)
            assert torch.equal(received.contiguous().view(-1), sent.detach().contiguous().view(-1)), index
            assert received.stride() == torch.zeros_like(sent.detach()).stride()


def test_tensors_of_all_kinds(pool: Pool, folder: Path) -> None:
    pool.run(exchange, 2, folder)


def exchange_ahead(gloo: Any, folder: Path, receives_first: bool) -> None:
    """Every worker sends 200 messages to each other one, and posts receives in another order."""
    with joined(gloo, folder) as here:
        rank, rng = gloo.rank(), random.Random(gloo.rank())
        messages = [(other, tag) for other in range(gloo.size()) if other != rank for tag in range(200)]

        def message(source: int, target: int, tag: int) -> Tensor:
            size = random.Random(1000 * source + 100 * target + tag).choice((0, 1, 999, 30_000, 300_000))
            return torch.full((size,), source + 10 * target + 100 * tag, dtype=torch.int32)

        def post() -> list[tuple[int, int, Tensor, Any]]:
            posted = []
            for source, tag in rng.sample(messages, len(messages)):
                memory = torch.zeros_like(message(source, rank, tag))
                work = dist.irecv(memory, group=here.group, group_src=source, tag=tag)
                posted.append((source, tag, memory, work))
            return posted

        posted = post() if receives_first else []
        sends = [
            dist.isend(message(rank, target, tag), group=here.group, group_dst=target, tag=tag)
            for target, tag in rng.sample(messages, len(messages))
        ]
        for source, tag, memory, work in posted or post():
            work.wait()
            assert work.is_completed()
            assert torch.equal(memory, message(source, rank, tag))
        assert all(work.wait() for work in sends)


@pytest.mark.parametrize("receives_first", [False, True])
def test_many_tags_in_any_order(pool: Pool, folder: Path, receives_first: bool) -> None:
    pool.run(exchange_ahead, 3, folder, receives_first)


def collectives(gloo: Any, folder: Path) -> dict[str, Tensor]:
    found = {}
    with joined(gloo, folder) as here:
        rank, size, group = gloo.rank(), gloo.size(), here.group
        mine = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
            found[name] = mine.clone()
            dist.all_reduce(found[name], op=op, group=group)
        parts = [torch.empty(1000) for _ in range(size)]
        dist.all_gather(parts, mine, group=group)
        found["gathered"] = torch.stack(parts)
        transposed = [torch.empty(40, 25).t() for _ in range(size)]
        dist.all_gather(transposed, mine.view(25, 40), group=group)
        assert torch.equal(torch.stack(transposed).view(size, -1), found["gathered"])
        flat = torch.empty(size * 1000)
        dist.all_gather_single(flat, mine, group=group)
        assert torch.equal(flat, found["gathered"].view(-1))
        found["broadcast"] = mine.clone()
        dist.broadcast(found["broadcast"], group_src=1, group=group)
        total = sum(parts[1:], parts[0])
        assert torch.equal(found["sum"], total)  # in the order of ranks
        part = torch.empty(1000 // size)
        dist.reduce_scatter_single(part, mine[: part.numel() * size].contiguous(), group=group)
        assert torch.equal(part, total[: part.numel() * size].chunk(size)[rank])
        dist.reduce_scatter(part, list(mine[: part.numel() * size].chunk(size)), group=group)
        assert torch.equal(part, total[: part.numel() * size].chunk(size)[rank])
        dist.barrier(group=group)
        assert torch.equal(Group.of(group).sum(mine.clone()), total)
        assert Group.of(group).gather({"rank": rank}) == [{"rank": each} for each in range(size)]
        work = dist.all_reduce(found["sum"].clone(), group=group, async_op=True)
        chained = work.get_future().then(lambda future: future.value()[0] * 2)
        assert torch.equal(chained.wait(), (found["sum"] * size) * 2)
    return found


@pytest.mark.parametrize("workers", [2, 3])
def test_collectives(pool: Pool, folder: Path, workers: int) -> None:
    first, *others = pool.run(collectives, workers, folder)
    inputs = torch.stack([torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(workers)])
    assert torch.equal(first["gathered"], inputs)
    assert torch.equal(first["max"], inputs.amax(0))
    assert torch.equal(first["min"], inputs.amin(0))
    assert torch.equal(first["broadcast"], inputs[1])
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def misuse(gloo: Any, folder: Path) -> None:
    with joined(gloo, folder) as here:
        rank, group = gloo.rank(), here.group
        assert capabilities_of(group, CPU).encrypted
        with pytest.raises(ValueError, match="receives from one worker at a time"):
            dist.recv(torch.zeros(1), group=group)
        with pytest.raises(ValueError, match="reduces by SUM, MAX, MIN, got PRODUCT"):
            dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.PRODUCT, group=group)
        long = torch.full((10,), 7.0)
        if rank == 0:
            dist.send(torch.ones(4), group=group, group_dst=1)
            with pytest.raises(RuntimeError, match=r"not complete after 0\.05 s"):
                dist.irecv(long, group=group, group_src=1, tag=9).wait(timedelta(seconds=0.05))
        else:
            dist.recv(long, group=group, group_src=0)  # longer than the message
            assert long.tolist() == [1.0] * 4 + [7.0] * 6
        Group.of(gloo).barrier()


def different_sizes(gloo: Any, folder: Path) -> str:
    """Worker 0 gets less than it expects, worker 1 more."""
    with joined(gloo, folder) as here:
        try:
            with link_errors("a sum"):
                dist.all_reduce(torch.zeros(2 - gloo.rank()), group=here.group)
        except LinkError as error:
            return str(error)
    return "no error"


def test_misuse(pool: Pool, folder: Path) -> None:
    pool.run(misuse, 2, folder)


def test_collectives_of_different_sizes(pool: Pool, folder: Path) -> None:
    less, more = pool.run(different_sizes, 2, folder)
    assert "rank 1 sent 4 bytes in a collective of 8" in less
    assert "worker 0 does not follow the protocol: a message of 8 bytes arrives for a receive of 4" in more


def subgroups(gloo: Any, folder: Path) -> None:
    with joined(gloo, folder) as here:
        rank = gloo.rank()
        made = [
            groups.new_group(gloo, [0, 2]),
            groups.new_group(gloo, [0, 2]),
            here.group,
        ]
        for value, group in enumerate(made):
            if rank == 0:
                dist.send(torch.tensor([value]), dst=2, group=group, tag=3)
        for value, group in reversed([*enumerate(made)]):
            if rank == 2:
                memory = torch.zeros(1, dtype=torch.int64)
                dist.recv(memory, src=0, group=group, tag=3)
                assert memory.tolist() == [value]
        if rank != 1:
            total = torch.tensor([1 + rank])
            dist.all_reduce(total, group=made[0])
            assert total.tolist() == [4]
        dist.barrier(group=here.group)


def test_groups_do_not_mix(pool: Pool, folder: Path) -> None:
    pool.run(subgroups, 3, folder)


def gradients_over(group: Any, layout: str, codec: str, chunks: int) -> list[Tensor]:
    """The gradients of this worker after three steps."""
    forward, backward = directions(codec)
    codecs = {"forward": forward, "backward": backward}
    if layout == "torch":
        module = cut(seeded(), group.size())[group.rank()]
        stages = [PipelineStage(module, group.rank(), group.size(), "cpu", group=group, **codecs)]
        schedule: Any = Schedule1F1B(stages[0], chunks, loss_fn=torch.nn.functional.mse_loss)
    else:
        stages, schedule = make(group, layout, "1f1b", chunks, seeded(), **codecs)
    for step in range(3):
        run_step(stages, schedule, *batch(256, seed=step))
    return [parameter.grad.clone() for stage in stages for parameter in stage.submod.parameters()]


def compare_pipelines(gloo: Any, folder: Path, layout: str, codec: str) -> int:
    with joined(gloo, folder) as here:
        expected = gradients_over(gloo, layout, codec, 4)
        found = gradients_over(here.group, layout, codec, 4)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        return len(found)


@pytest.mark.parametrize("codec", ["none", "8bit"])
@pytest.mark.parametrize(("layout", "workers"), [("torch", 2), ("client-server", 2), ("client-server", 3)])
def test_pipelines_equal_gloo(pool: Pool, folder: Path, layout: str, workers: int, codec: str) -> None:
    assert all(pool.run(compare_pipelines, workers, folder, layout, codec))


def compare_replicas(gloo: Any, folder: Path, hook: str | None) -> None:
    with joined(gloo, folder) as here:
        expected = replica.run(gloo, hook, 3, {})
        found = replica.run(here.group, hook, 3, {})
        for ours, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("hook", [None, "none", "uniform:8"])
def test_replicas_equal_gloo(pool: Pool, folder: Path, hook: str | None) -> None:
    pool.run(compare_replicas, 2, folder, hook)


def chain(gloo: Any, folder: Path) -> float:
    """A callback of one all-reduce waits for another, as in torch's PowerSGD."""
    with joined(gloo, folder) as here:

        def again(future: Any) -> Tensor:
            total = future.value()[0].clone()
            return dist.all_reduce(total, group=here.group, async_op=True).get_future().wait()[0]

        work = dist.all_reduce(torch.tensor([1.0 + gloo.rank()]), group=here.group, async_op=True)
        return float(work.get_future().then(again).wait())


def test_callbacks_may_wait(pool: Pool, folder: Path) -> None:
    assert pool.run(chain, 2, folder) == [6.0, 6.0]


def lose_a_peer(gloo: Any, folder: Path) -> str:
    """Worker 1 goes away for good while worker 0 waits."""
    with joined(gloo, folder, patience_s=1) as here:
        if gloo.rank() == 1:
            Group.of(gloo).barrier()
            here.mesh.channel(0).session.fail("the process ends without a goodbye")
            here.mesh.channel(0).close(0)
            return ""
        waiting = dist.irecv(torch.zeros(1), group=here.group, group_src=1)
        Group.of(gloo).barrier()
        try:
            with link_errors("receiving"):
                waiting.wait()
        except LinkError as error:
            return str(error)
    return "no error"


def test_a_lost_peer(pool: Pool, folder: Path) -> None:
    error, _ = pool.run(lose_a_peer, 2, folder)
    assert error.startswith("another worker is gone: receiving failed. Look for its first error. (worker 1 is gone:")


def default_group(rank: int, connection: socket.socket, end: Any) -> None:
    """A process whose default group is of this backend, and whose store is of nobody else."""
    mesh = Mesh(rank, 2, patience_s=60, report=print)
    mesh.pair(1 - rank, None)
    mesh.attach(1 - rank, connection)  # type: ignore[arg-type]
    mesh.start()
    use(mesh)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=2)
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    names = [dist.get_backend(group) for group in (None, new_group(), new_group([0, 1]))]
    alone = new_group([1])
    group_sum = Group.of(new_group()).sum(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
    mesh.close()
    end.send((total.tolist(), objects, names, group_sum.tolist(), alone is not None))


def test_the_default_group() -> None:
    context = multiprocessing.get_context("forkserver")
    connections = socket.socketpair()
    ends = [context.Pipe() for _ in connections]
    workers = [
        context.Process(target=default_group, args=(rank, connections[rank], ends[rank][1]), daemon=True)
        for rank in (0, 1)
    ]
    for worker in workers:
        worker.start()
    for mine, _ in ends:
        assert mine.poll(120)
        total, objects, names, group_sum, _ = mine.recv()
        assert (total, objects) == ([3.0], [{"rank": 0}, {"rank": 1}])
        assert names == [BACKEND] * 3
        assert group_sum == [2.0]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    for connection in connections:
        connection.close()
