"""Labelled tokens per second of packed and padded chats, and the step time of DPO and fine-tuning, in turns.

    python benchmarks/packing.py 5

Three stages in one process with 8bit links, on one thread; times are processor time, so other processes matter little.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.codecs.recipes import directions
from thinpipe.comm.group import Group
from thinpipe.train.engines.loss import Loss
from thinpipe.train.engines.pipeline import Cutting, Links, PipelineEngine
from thinpipe.train.engines.preference import PreferenceLoss
from thinpipe.train.engines.step import train_step
from thinpipe.train.engines.units import cut_model, meta_of
from thinpipe.train.engines.world import World
from thinpipe.train.models.packed import INPUTS
from thinpipe.train.tasks.chat import Encoded, Examples
from thinpipe.train.tasks.preference import Pairs
from thinpipe.train.tasks.task import IGNORED, Batch

LENGTH, ROWS, CHUNKS, VOCABULARY = 256, 16, 4, 2000
GENERATOR = torch.Generator().manual_seed(0)


def text(tokens: int) -> Encoded:
    """Random tokens, of which the second half is the answer."""
    ids = torch.randint(10, VOCABULARY, (tokens,), generator=GENERATOR, dtype=torch.int32)
    return Encoded(ids, torch.arange(tokens) >= tokens // 2, tokens, False)


def lengths() -> Iterator[int]:
    """Yield exponentially distributed lengths of 8 to LENGTH tokens, with a mean of 41, and one of LENGTH."""
    yield LENGTH
    for _ in range(2000):
        yield max(8, min(LENGTH, int(-40 * torch.rand(1, generator=GENERATOR).log())))


def engine(world: World, batch: Batch, *, packed: bool, make_loss: Callable[..., Loss] = Loss) -> Any:
    """Return the engine of a Llama of 6 layers, and its optimizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8}
    chunk = meta_of([each[: ROWS // CHUNKS] for each in batch.inputs])
    units = cut_model(
        LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)), chunk, **({"names": INPUTS} if packed else {})
    )
    cutting = Cutting(layout="client-server", order="gpipe", chunks=CHUNKS, client_layers=(1, 1), in_process=3)
    made = PipelineEngine(
        units,
        chunk,
        cutting,
        Links(**dict(zip(("forward", "backward"), directions("8bit"), strict=True))),
        world,
        make_loss=make_loss,
    )
    made.warm_up()
    return made, torch.optim.SGD(made.parameters(), lr=1e-3)


def alternate(rounds: int, steps: dict[str, Callable[[int], float]]) -> dict[str, list[float]]:
    """Return the results of alternating steps; the first of each is a warm-up."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            found[name] += [step(number)][: number > 0]
    return found


def show(what: str, found: dict[str, list[float]]) -> None:
    (first, slow), (second, fast) = found.items()
    ratio = median(one / other for one, other in zip(fast, slow, strict=True))
    print(f"{what}: {first} {median(slow):.4g}, {second} {median(fast):.4g}, ratio {ratio:.3f}", flush=True)


def rate(world: World, texts: list[Encoded], *, packed: bool) -> Callable[[int], float]:
    """Return a step that returns labelled tokens per second."""
    data = (Examples.packed_of if packed else Examples.padded_of)(texts, LENGTH, 0, True)
    made, optimizer = engine(world, data.batch(torch.arange(ROWS)), packed=packed)
    order = torch.randperm(len(data), generator=GENERATOR)

    def step(number: int) -> float:
        start = number * ROWS % (len(data) - ROWS)
        batch = data.batch(order[start : start + ROWS])
        began = time.process_time()
        train_step(made, optimizer, batch, step=number + 1)
        return int((batch.labels != IGNORED).sum()) / (time.process_time() - began)

    return step


def seconds(world: World, rows: Examples, *, pairs: bool) -> Callable[[int], float]:
    """Return a step of DPO, or of fine-tuning on the same packed tokens, that returns its seconds."""
    every: Tensor = torch.arange(ROWS)
    batch = (Pairs(rows, 0) if pairs else rows).batch(every)
    made, optimizer = engine(world, batch, packed=True, make_loss=partial(PreferenceLoss, beta=0.1) if pairs else Loss)
    if pairs:
        made.loss.keep(made.predict(batch.inputs), batch.labels)

    def step(number: int) -> float:
        began = time.process_time()
        train_step(made, optimizer, batch, step=number + 1)
        return time.process_time() - began

    return step


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        group = dist.group.WORLD
        world = World(worker=0, workers=1, device=torch.device("cpu"), group=group, control=Group.of(group))
        texts = [text(length) for length in lengths()]
        ways = {name: rate(world, texts, packed=name == "packed") for name in ("padded", "packed")}
        show("labelled tokens/s", alternate(rounds, ways))
        rows = Examples([(text(LENGTH // 2), text(LENGTH // 2)) for _ in range(ROWS)], LENGTH, 0, False, packed=True)
        ways = {name: seconds(world, rows, pairs=name == "DPO") for name in ("fine-tuning", "DPO")}
        show("seconds per step", alternate(rounds, ways))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
