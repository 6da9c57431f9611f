"""Servers that train a language model receive hidden states and load their own blocks, nothing else."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pool
from tests.train.tasks.written import write_language_model
from tests.train.test_lm import TEXT
from tests.train.toy import Recorder, settings_for, world_in
from thinpipe.links.recv import RecvLink
from thinpipe.train import build as building
from thinpipe.train.models import identity, weights
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.tasks import task
from thinpipe.train.worker import train

TOKENS, STEPS, HIDDEN = 16, 2, 32
# Whatever else could bring a tensor to a worker: seen to be unused, or the tap would be blind to it.
UNUSED = [
    *("broadcast", "all_reduce", "reduce", "scatter", "gather", "all_gather_into_tensor", "all_to_all"),
    *("reduce_scatter", "batch_isend_irecv", "recv_object_list", "broadcast_object_list", "all_gather_object"),
]


@dataclass
class Seen:
    """By one worker, in a whole run."""

    received: list[bytes] = field(default_factory=list)  # everything that any other worker sent
    tensors: set[tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=set)  # over links, decoded
    link_bytes: int = 0  # of what was received, that of training's links, as the run reports it
    opened: list[str] = field(default_factory=list)  # files
    weights: set[str] = field(default_factory=set)  # that were read from the model's files
    filled: set[str] = field(default_factory=set)  # parameters that have values
    tokens: list[list[int]] = field(default_factory=list)  # the client's: every sample, with the label of its last


class Arriving:
    """A pending receive: its bytes are known after the wait."""

    def __init__(self, work: Any, tensor: Tensor, seen: Seen) -> None:
        self.work, self.tensor, self.seen = work, tensor, seen

    def wait(self) -> None:
        self.work.wait()
        self.seen.received.append(self.tensor.contiguous().view(torch.uint8).numpy().tobytes())


def watched(seen: Seen) -> list[Any]:
    """Patches of all that brings something to this worker."""
    irecv, recv, all_gather, receive, safe_open = (
        *(dist.irecv, dist.recv, dist.all_gather),
        *(RecvLink.receive, weights.safe_open),
    )

    def watched_recv(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        recv(tensor, *args, **kwargs)
        seen.received.append(tensor.numpy().tobytes())

    def watched_all_gather(parts: list[Tensor], *args: Any, **kwargs: Any) -> None:
        all_gather(parts, *args, **kwargs)
        seen.received.extend(part.numpy().tobytes() for part in parts)

    def watched_receive(link: RecvLink, chunk: int) -> list[Tensor]:
        tensors = receive(link, chunk)
        seen.tensors |= {(each.dtype, tuple(each.shape)) for each in tensors}
        return tensors

    class Opened:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> Opened:
            self.inside = self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> Any:
            return self.inside.keys()

        def get_slice(self, name: str) -> Any:
            seen.weights.add(name)
            return self.inside.get_slice(name)

    return [
        mock.patch.object(dist, "irecv", lambda tensor, **how: Arriving(irecv(tensor, **how), tensor, seen)),
        mock.patch.object(dist, "recv", watched_recv),
        mock.patch.object(dist, "all_gather", watched_all_gather),
        mock.patch.object(RecvLink, "receive", watched_receive),
        mock.patch.object(weights, "safe_open", Opened),
        # All workers compare a hash of the first values of every tensor: that is not loading it.
        mock.patch.object(identity, "open_tensors", lambda file: safe_open(file, framework="pt")),
        *(mock.patch.object(dist, name, side_effect=AssertionError(f"{name} is not watched")) for name in UNUSED),
    ]


def see(group: Any, given: dict[str, Any]) -> Seen:
    seen, recorder, lm, watching, models = Seen(), Recorder(), task("lm"), [True], []
    settings = settings_for(lm, group, **given)

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and watching:  # a hook stays for ever
            seen.opened.append(str(args[0]))

    def make_engine(units: Any, *args: Any, **kwargs: Any) -> Any:
        models.append(units.model)
        return engine(units, *args, **kwargs)

    engine, patches = building.PipelineEngine, watched(seen)
    sys.addaudithook(note)
    for patch in [*patches, mock.patch.object(building, "PipelineEngine", make_engine)]:
        patch.start()
    try:
        end = train(lm, settings, RunOptions(steps=STEPS), world_in(group), lambda: recorder)
    finally:
        mock.patch.stopall()
        watching.clear()
    seen.link_bytes = sum(link.wire_bytes for link in end.links if link.target % group.size() == group.rank())
    seen.filled = {name for name, parameter in models[0].named_parameters() if not parameter.is_meta}
    if group.rank() == 0:
        data, _ = lm.load(settings.source)
        for split in (data.train, data.validation):
            batch = split.batch(torch.arange(len(split)))
            seen.tokens += torch.cat([batch.inputs[0], batch.labels[:, -1:]], 1).tolist()
    return seen


def written_as(tokens: list[int]) -> list[bytes]:
    """A sequence in every form it could have: as numbers of any width, and as text."""
    row = torch.tensor(tokens)
    forms = [row.to(dtype).numpy().tobytes() for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)]
    forms += [row.to(dtype).view(torch.uint8).numpy().tobytes() for dtype in (torch.float32, torch.float16)]
    return [*forms, *(separator.join(map(str, tokens)).encode() for separator in (", ", ",", " "))]


def found(tokens: list[list[int]], received: list[bytes]) -> int:
    """How many samples have half of their tokens, or labels, in a row somewhere in what was received."""
    everything = b"|".join(received)
    halves = [(row[: TOKENS // 2], row[-TOKENS // 2 :]) for row in tokens]
    return sum(any(form in everything for half in pair for form in written_as(half)) for pair in halves)


def test_servers_receive_hidden_states_and_load_their_own_blocks(pool: Pool, tmp_path: Path) -> None:
    write_language_model(tmp_path / "model", TEXT, tied=False)
    (tmp_path / "text.txt").write_text(TEXT)
    given = {"model": str(tmp_path / "model"), "data": str(tmp_path / "text.txt"), "tokens": TOKENS, "batch_size": 8}
    given |= {"chunks": 2, "compress": "none"}
    client, *servers = pool.run(see, 3, given)
    assert len(client.tokens) > 20
    # What would be found, were it there.
    assert all(found([row], [b"before" + form + b"behind"]) for row in client.tokens[:2] for form in written_as(row))
    assert client.opened.count(given["data"]) >= 1
    for number, server in enumerate(servers):
        assert sum(map(len, server.received)) > server.link_bytes > STEPS * 8 * TOKENS * HIDDEN * 4
        assert server.tensors == {(torch.float32, (4, TOKENS, HIDDEN))}
        assert found(client.tokens, server.received) == 0
        opened = {Path(path).name for path in server.opened if path.startswith(str(tmp_path))}
        assert opened <= {"config.json", "generation_config.json", "model.safetensors"}
        assert server.weights == server.filled
        blocks = {f"model.layers.{block}." for block in ((0,), (1, 2))[number]}
        assert {name[: len("model.layers.0.")] for name in server.weights} == blocks
    assert client.weights == client.filled == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert len(client.weights) + sum(len(server.weights) for server in servers) == 3 + 3 * 9
