"""Transfers of messages of all sizes between two workers, one way and both ways, through the pipeline's links."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta

import torch
from torch import Tensor

from thinpipe.codecs import codec
from thinpipe.comm.backend import new_group
from thinpipe.comm.group import Group
from thinpipe.lab.bench.codecs.synthetic import laplace
from thinpipe.lab.bench.link.link_columns import KIND, LinkColumns, make_row, with_lines
from thinpipe.lab.bench.link.link_options import WORKERS, LinkBenchOptions
from thinpipe.lab.bench.link.link_tables import plot_times, result_tables, row_line
from thinpipe.lab.bench.link.probe import check_probed, probe
from thinpipe.lab.bench.outcome import Outcome, Print
from thinpipe.lab.netem.network import thin_network
from thinpipe.lab.records.record import Record, Row, columns_of
from thinpipe.launch.workers import run_workers
from thinpipe.links.counters import LinkEnd
from thinpipe.links.link import Link
from thinpipe.links.link_codec import warm_codec
from thinpipe.links.recv import RecvLink
from thinpipe.links.registry import link_codec
from thinpipe.links.send import SendLink
from thinpipe.links.slot import Route, Slot
from thinpipe.pipeline.report import gather_links
from thinpipe.train.engines.world import join_world
from thinpipe.train.shaping import Shaping, link_text, list_facts

_ROW = 250  # values in a row of a tensor, 1 kB: low-rank codecs need matrices
_WAIT = timedelta(hours=1)  # timeout of one message: 100 MB take 15 minutes at 1 Mbit/s


def measure(options: LinkBenchOptions, on_row: Print, on_progress: Print) -> Outcome | None:
    """Measure all links; return the results in the first worker's process, None in others."""
    rows: list[Row] = []
    for link in options.links:
        backend = options.backend(link)
        if backend == "nccl":
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # timestamps at arrival, not at enqueueing
        with thin_network(link, WORKERS) as network:
            arguments = (options, link, backend, on_row)
            rows += run_workers(_exchange, *arguments, workers=WORKERS, network=network, backend=backend)[0] or ()
    if not rows:
        return None
    rows, probed = with_lines(rows), {row["link"]: row for row in rows}
    shaped = [link for link in options.links if link and options.verify]
    config = {name: value for name, value in asdict(options).items() if name != "workers"}
    record = Record(
        kind=KIND,
        config=config | {"links": list_facts(options.links), "device": str(options.found_device)},
        columns=columns_of(LinkColumns),
        rows=tuple(rows),
        checks=tuple(check for link in shaped for check in check_probed(link, probed[link.text])),
    )
    return Outcome(title="Links", record=record, tables=result_tables(rows), plot=plot_times(rows))


def _exchange(options: LinkBenchOptions, link: Shaping | None, backend: str, on_row: Print) -> list[Row] | None:
    """Measure one link on both workers; return the rows on the first, None on the other. A collective."""
    world = join_world(options.found_device.type, threads=max(1, (os.cpu_count() or 1) // WORKERS))
    worker, device = world.worker, world.device
    between = Group.of(new_group(timeout=_WAIT))  # for synchronization, whatever backend messages use
    # NCCL may bypass the network.
    probed = probe(link, options.probe_s if backend == "gloo" else 0.0, between)
    links, rows = list(map(link_text, options.links)), []
    for spec in options.codecs:
        for both_ways in (False, True):
            for size in options.sizes:
                ends = _Ends(spec, size, both_ways, device, between)
                measured = ends.measure(options)
                for ways, chosen in _directions(link, both_ways, measured) if worker == 0 else ():
                    rows.append(make_row(link, backend, spec, ways, ends.tensor_bytes, chosen, probed))
                    on_row(row_line(rows[-1], links, options.codecs))
    return rows if worker == 0 else None


def _directions(link: Shaping | None, both_ways: bool, ends: list[LinkEnd]) -> Iterator[tuple[str, list[LinkEnd]]]:
    """Yield the measured link ends, by direction if their rates differ; worker 0 sends up."""
    if not both_ways:
        yield "one way", ends
    elif link is None or link.paths(2)[0, 1].queues[0].mbit_per_s == link.paths(2)[1, 0].queues[0].mbit_per_s:
        yield "both ways", ends
    else:
        for source, name in enumerate(("up", "down")):
            yield f"both, {name}", [end for end in ends if end.source == source]


class _Ends:
    """This worker's ends of one link, or of both its directions."""

    def __init__(self, spec: str, size: int, both_ways: bool, device: torch.device, between: Group) -> None:
        worker = between.rank
        self._between, self._device = between, device
        self._tensor = _content(size).to(device)
        self.tensor_bytes = self._tensor.numel() * self._tensor.element_size()
        self._links: list[Link] = []
        for source in (0, 1) if both_ways else (0,):
            kind = SendLink if worker == source else RecvLink
            route = Route(source, 1 - source, worker == source, device, None, peer=1 - worker)
            end = kind(link_codec(spec), route, [])
            end.configure([Slot.of(self._tensor)], 1)
            if both_ways and isinstance(end, RecvLink):
                end.trace = True  # a worker that is still encoding does not notice the arrival of a message
            self._links.append(end)
        warm_codec(codec(spec), self._tensor.shape, self._tensor.dtype, device)

    def measure(self, options: LinkBenchOptions) -> list[LinkEnd]:
        """Return the counters and timestamps of both workers for the timed messages. A collective."""
        self._between.barrier()  # the other worker may still compile its codec
        began = time.perf_counter()
        self._send_and_receive(0, options.sender_delay_s)
        took_s = time.perf_counter() - began
        # The first message is a warm-up and not counted, unless it alone exceeds the budget.
        repeat = max(1, min(options.repeat, math.floor(options.budget_s / took_s)))
        repeat = min(self._between.gather(repeat))
        outlasts = max(self._between.gather(took_s)) > options.budget_s
        if not outlasts:
            for link in self._links:
                link.reset_counters()
            for step in range(1, repeat + 1):
                self._send_and_receive(step, options.sender_delay_s)
        return gather_links(self._links, self._between)

    def _send_and_receive(self, step: int, sender_delay_s: float) -> None:
        sends = [link for link in self._links if isinstance(link, SendLink)]
        receives = [link for link in self._links if isinstance(link, RecvLink)]
        for link in self._links:
            link.begin_step(step)
            link.codec.begin_step(step, training=True)
            link.events.clear()
        for receive in receives:
            receive.post()
        self._between.barrier()
        for send in sends:
            if send.source == 0:
                time.sleep(sender_delay_s)
            send.send(0, [self._tensor])
        for receive in receives:
            receive.receive(0)
            receive.release(0)
        for send in sends:
            send.finish()


def _content(size: int) -> Tensor:
    count = size // 4
    shape = (count,) if count % _ROW else (count // _ROW, _ROW)
    return laplace(shape, torch.Generator().manual_seed(0))
