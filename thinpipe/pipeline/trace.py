"""The timeline of one step: computation, codecs, waiting and transfers on every worker.

for stage in stages: stage.trace()     # on every worker
schedule.step(...)
step = gather_step(stages)             # a collective
if worker == 0: draw(step, "step.png"); write_chrome_trace(step, "step.json")   # chrome://tracing, Perfetto
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinpipe.comm.group import Group
from thinpipe.pipeline.report import clock_offset, gather_ends, match
from thinpipe.pipeline.stage import PipelineStage

LANES = {
    "compute": ("forward", "backward", "weight"),
    "codec": ("encode", "decode"),
    "wait": ("wait",),
    "transfer": ("forward transfer", "backward transfer"),
}
_LANE_OF = {kind: lane for lane, kinds in LANES.items() for kind in kinds}
_COLORS = {
    "forward": "#4c78a8",
    "backward": "#9ecae9",
    "weight": "#2f5d8a",
    "encode": "#f58518",
    "decode": "#ffbf79",
    "wait": "#bab0ac",
    "forward transfer": "#54a24b",
    "backward transfer": "#88d27a",
}


@dataclass(frozen=True)
class Bar:
    """An interval on the timeline of one worker; transfers belong to the receiving worker."""

    worker: int
    kind: str
    stage: int
    chunk: int
    start_ms: float  # from the start of the step
    end_ms: float

    @property
    def lane(self) -> str:
        return _LANE_OF[self.kind]


def gather_step(stages: Sequence[PipelineStage]) -> list[Bar]:
    """Return the timeline of the last step of all workers, as bars for ``draw``. A collective.

    If arrivals were not traced, a transfer is drawn until its chunk was used if the receiver waited for it, and left
    out otherwise: its end is not known.
    """
    group = Group.of(stages[0].group, stages[0].device)
    offset = clock_offset(group)
    mine = [asdict(event) for stage in stages for event in stage.links.events]
    bars = [
        (worker, event["kind"], event["stage"], event["chunk"], event["start"] + shift, event["end"] + shift)
        for worker, (shift, events) in enumerate(group.gather([offset, mine]))
        for event in events
    ]
    ends = gather_ends(stages)
    sends = {(end.source, end.target): end for end in ends if end.sends}
    for end in (end for end in ends if not end.sends):
        kind = "forward transfer" if end.target > end.source else "backward transfer"
        for sent, received in match(sends[end.source, end.target], end):
            seen = received.end if received.end - received.start > 1e-4 else None
            arrived = seen if received.arrived is None else received.arrived
            if received.step == stages[0].steps and arrived is not None:
                bars.append((end.worker, kind, end.target, received.chunk, sent.start, max(arrived, sent.start)))
    origin = min((bar[4] for bar in bars), default=0.0)
    return sorted(
        (
            Bar(w, kind, stage, chunk, (start - origin) * 1e3, (end - origin) * 1e3)
            for w, kind, stage, chunk, start, end in bars
        ),
        key=lambda bar: (bar.worker, bar.start_ms),
    )


def write_chrome_trace(bars: Sequence[Bar], path: str | Path) -> None:
    """Write the timeline of a step as JSON for chrome://tracing and Perfetto."""
    lanes = list(LANES)
    events: list[dict[str, Any]] = []
    for worker in sorted({bar.worker for bar in bars}):
        events.append({"ph": "M", "name": "process_name", "pid": worker, "args": {"name": f"worker {worker}"}})
        for number, lane in enumerate(lanes):
            names = {"ph": "M", "name": "thread_name", "pid": worker, "tid": number, "args": {"name": lane}}
            events.append(names)
    for bar in bars:
        events.append(
            {
                "ph": "X",
                "name": f"{bar.kind} {bar.chunk}",
                "cat": bar.lane,
                "pid": bar.worker,
                "tid": lanes.index(bar.lane),
                "ts": bar.start_ms * 1e3,  # the format counts in microseconds
                "dur": (bar.end_ms - bar.start_ms) * 1e3,
                "args": {"stage": bar.stage, "chunk": bar.chunk},
            }
        )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def draw(bars: Sequence[Bar], path: str | Path) -> None:
    """Draw the timeline of a step as a PNG: a band per worker, with lanes for compute, codec, wait and transfer."""
    from matplotlib.figure import Figure  # not at the top: the import takes half a second
    from matplotlib.patches import Patch

    workers = sorted({bar.worker for bar in bars})
    lanes = [lane for lane in LANES if any(bar.lane == lane for bar in bars)]
    rows = {key: number for number, key in enumerate((worker, lane) for worker in workers for lane in lanes)}
    figure = Figure(figsize=(12, 0.6 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for bar in bars:
        row = rows[bar.worker, bar.lane]
        width = bar.end_ms - bar.start_ms
        axes.barh(row, width, left=bar.start_ms, height=0.85, color=_COLORS[bar.kind], edgecolor="white", linewidth=0.4)
        if bar.lane == "compute":
            axes.text(bar.start_ms + width / 2, row, str(bar.chunk), ha="center", va="center", fontsize=6)
    for worker in workers[1:]:
        axes.axhline(rows[worker, lanes[0]] - 0.5, color="black", linewidth=0.6)
    axes.set_yticks(list(rows.values()), [f"worker {worker} {lane}" for worker, lane in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms from the start of the step; numbers are chunks")
    kinds = [kind for kind in _COLORS if any(bar.kind == kind for bar in bars)]
    handles = [Patch(color=_COLORS[kind], label=kind) for kind in kinds]
    axes.legend(handles=handles, ncols=len(kinds), fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=150)
