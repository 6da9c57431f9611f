"""Reports of all links of a pipeline: counters of both ends merged, with waiting and transfer times separated.

A receiver blocks (``blocked_ms``) for two reasons, which the sender's time stamp separates:

    receiver            needs the chunk |------------------------------------| can use it
    sender                                    hands it to the network |
                                        |<-------- wait_ms ---------->|<---->| transfer_ms

A transfer that ends before the chunk is needed costs nothing and counts in neither. The rate of a link can be measured
only from complete transfers: those that the receiver waited for from their start, and all of a traced step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from thinpipe.comm.group import Group
from thinpipe.links.counters import LinkEnd, Stamp, now
from thinpipe.links.link import Link
from thinpipe.pipeline.stage import PipelineStage

_TIMES = ("encode_ms", "decode_ms", "blocked_ms", "wait_ms", "transfer_ms")
_PINGS = 8  # per worker; the one with the shortest round trip gives the clock offset


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """The counters of one direction of one link, since they were last reset."""

    source: int  # stage that sends
    target: int  # stage that receives
    source_worker: int
    target_worker: int
    direction: str  # forward: activations; backward: gradients
    messages: int
    tensor_bytes: int
    wire_bytes: int
    encode_ms: float
    decode_ms: float
    blocked_ms: float  # the receiver was blocked
    wait_ms: float  # of that, the sender had nothing to send yet
    transfer_ms: float  # of that, the message was in transit
    link_mb_per_s: float | None  # over complete transfers; None if all were hidden behind compute

    def plus(self, more: LinkReport) -> LinkReport:
        """Return the sum with a later report of the same link, without a rate."""
        totals = ("messages", "tensor_bytes", "wire_bytes", *_TIMES)
        sums = {name: getattr(self, name) + getattr(more, name) for name in totals}
        return replace(self, **sums, link_mb_per_s=None)

    @property
    def blocked_mb_per_s(self) -> float:
        """The bytes per time blocked; not a bandwidth: a late sender makes it small, and overlap makes it huge."""
        return self.wire_bytes / max(self.blocked_ms, 1e-6) / 1e3


def report(stages: Sequence[PipelineStage]) -> list[LinkReport]:
    """Return the counters of all links of the pipeline, on every worker. A collective: all workers call it.

    Stamps of more than ``counters.STAMPS`` messages ago are gone: report, and reset, once per epoch or so.
    """
    ends = gather_ends(stages)
    sends = {(end.source, end.target): end for end in ends if end.sends}
    receives = [end for end in ends if not end.sends]
    return [
        _merge(sends[end.source, end.target], end)
        for end in sorted(receives, key=lambda end: (end.source > end.target, end.source))
    ]


def reset_counters(stages: Sequence[PipelineStage]) -> None:
    """Reset the counters of all links; call it on all workers, between steps."""
    for stage in stages:
        for link in stage.links:
            link.reset_counters()
        for clock in stage.clocks.values():
            clock.reset()


def gather_ends(stages: Sequence[PipelineStage]) -> list[LinkEnd]:
    """Return the link ends of all workers: counters, and stamps in the time of worker 0. A collective."""
    links = [link for stage in stages for link in stage.links]
    return gather_links(links, Group.of(stages[0].group, stages[0].device))


def gather_links(links: Sequence[Link], group: Group) -> list[LinkEnd]:
    """Return the link ends of links without a stage. A collective of ``group``, which may differ from the links'."""
    offset = clock_offset(group)
    everyone = group.gather([link.end().to_json(offset) for link in links])
    return [LinkEnd.from_json(end, worker) for worker, ends in enumerate(everyone) for end in ends]


def clock_offset(group: Group) -> float:
    """Return the seconds to add to this worker's clock to get worker 0's. A collective.

    The error is half a round trip; on one machine all processes read one clock, and there is none.
    """
    machines = group.gather(machine_id())
    worker, offset, quickest = group.rank, 0.0, float("inf")
    for other, machine in enumerate(machines):
        if machine is not None and machine == machines[0]:
            continue
        for _ in range(_PINGS if worker in (0, other) and other else 0):
            began = now()
            theirs = _ping(group, other if worker == 0 else 0, replies=worker == 0)
            ended = now()
            if worker and ended - began < quickest:
                quickest, offset = ended - began, theirs - (began + ended) / 2
    return offset


def _ping(group: Group, peer: int, *, replies: bool) -> float:
    """Request another worker's time, or reply to such a request; return the time received."""
    stamp = torch.zeros(1, dtype=torch.float64, device=group.wire_device)
    if replies:
        group.receive(stamp, peer)
        group.send(stamp.fill_(now()), peer)
    else:
        group.send(stamp, peer)
        group.receive(stamp, peer)
    return float(stamp)


def machine_id() -> str | None:
    """Return the boot id, equal for all processes of one running machine only; None if it is not available."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def match(send: LinkEnd, receive: LinkEnd) -> list[tuple[Stamp, Stamp]]:
    """Return the stamps of both ends for each message of which both have one."""
    sent = {(stamp.step, stamp.chunk, stamp.slot): stamp for stamp in send.stamps}
    pairs = [(sent.get((stamp.step, stamp.chunk, stamp.slot)), stamp) for stamp in receive.stamps]
    return [(s, r) for s, r in pairs if s is not None]


def transfer_s(sent: Stamp, received: Stamp) -> float:
    """Return the transfer time of a message whose receiver waited for it, or whose arrival was traced."""
    return max((received.end if received.arrived is None else received.arrived) - sent.start, 0.0)


def _merge(send: LinkEnd, receive: LinkEnd) -> LinkReport:
    wait = transfer = complete_s = 0.0
    complete_bytes = 0
    for sent, received in match(send, receive):
        late = min(max(sent.start - received.start, 0.0), received.end - received.start)
        wait += late
        transfer += received.end - received.start - late
        if received.arrived is not None or sent.start >= received.start:
            complete_s += transfer_s(sent, received)
            complete_bytes += received.wire_bytes
    mine, theirs = receive.counters, send.counters
    return LinkReport(
        source=send.source,
        target=send.target,
        source_worker=send.worker,
        target_worker=receive.worker,
        direction="forward" if send.target > send.source else "backward",
        messages=mine.messages,
        tensor_bytes=mine.tensor_bytes,
        wire_bytes=mine.wire_bytes,
        encode_ms=theirs.encode_ms,
        decode_ms=mine.decode_ms,
        blocked_ms=mine.blocked_ms,
        wait_ms=wait * 1e3,
        transfer_ms=transfer * 1e3,
        link_mb_per_s=complete_bytes / complete_s / 1e6 if complete_s > 0 else None,
    )
