"""The link ends of a stage: up to four, in two directions, to the previous and the next stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinpipe.codecs.base import Codec
from thinpipe.codecs.recipes import directions
from thinpipe.comm.backend import capabilities_of
from thinpipe.links.activation_cache import SentSamples
from thinpipe.links.counters import Event
from thinpipe.links.link import Link
from thinpipe.links.recv import RecvLink
from thinpipe.links.registry import check_directions, link_codec, sent_once
from thinpipe.links.send import SendLink
from thinpipe.links.slot import Handover, Route, Slot


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The options of the links of a stage."""

    forward: str | Codec
    backward: str | Codec
    seed: int = 0  # of stochastic rounding (``+sr``). With the same seed, runs are bit-identical
    # Stages before this one give the same outputs for a sample in every step, which are then sent once and kept by it;
    # None: all are sent in every step.
    frozen_before: int | None = None
    samples: int | None = None  # number of different samples: needed by ``frozen_before``
    copies_in: Path | None = None  # directory for what is kept, on disk; None: in memory
    keeps: bool = True  # False: encode outputs of those stages as if they were kept, but send them in every step
    window: int = SendLink.window  # chunks in transit on a link before the worker waits for the oldest
    post_ahead: bool | None = None  # post all receives at the start of a step; None: if messages have tags (gloo)
    handover: Handover | None = None  # through which stages of one process exchange wires


class StageLinks:
    """The link ends of one stage; an end is None if there is no such neighbour, or it is on the same worker."""

    def __init__(self, stage: int, stages: int, device: torch.device, group: Any, options: LinkOptions) -> None:
        forward, backward = options.forward, options.backward
        forward = directions(forward)[0] if isinstance(forward, str) else forward
        backward = directions(backward)[1] if isinstance(backward, str) else backward
        check_directions(forward, backward)
        self.forward_spec, self.backward_spec = link_codec(forward).spec, link_codec(backward).spec
        # Of the stages before ``frozen_before``, and of the one that keeps their outputs.
        self.sent: SentSamples | None = None
        before, self.kept = options.frozen_before, [options.frozen_before, options.samples]
        if before is not None and stage <= before:
            if options.samples is None:
                raise ValueError(f"stage {before} keeps activations of every sample: give their number, samples=N")
            self.sent = SentSamples(options.samples, keeps=options.keeps)
        self.is_repeated = before is not None and stage < before
        self.events: list[Event] = []  # of the current or the last step
        self.samples: Tensor | None = None  # of the next step
        ends: dict[str, Link] = {}
        is_ahead = capabilities_of(group, device).tags if options.post_ahead is None else options.post_ahead
        for name, source, target in (
            ("forward_recv", stage - 1, stage),
            ("forward_send", stage, stage + 1),
            ("backward_recv", stage + 1, stage),
            ("backward_send", stage, stage - 1),
        ):
            if min(source, target) >= 0 and max(source, target) < stages:
                spec = forward if target > source else backward
                is_once = target > source and before is not None and target <= before
                storage = {"stores": target == stage == before, "directory": options.copies_in}
                codec = sent_once(spec, self.sent, **storage) if is_once else link_codec(spec)
                codec.seed = options.seed
                route = Route(source, target, source == stage, device, group, handover=options.handover)
                kind = SendLink if route.sends else RecvLink
                ends[name] = kind(codec, route, self.events, scheduled=not is_ahead)
                ends[name].sent = self.sent if is_once else None
        self._set(ends)
        for each in self.sends:
            each.window = options.window

    def __iter__(self) -> Iterator[Link]:
        return iter(self._ends.values())

    def _set(self, ends: dict[str, Any]) -> None:
        self._ends: dict[str, Link] = ends
        self.forward_recv: RecvLink | None = ends.get("forward_recv")
        self.forward_send: SendLink | None = ends.get("forward_send")
        self.backward_recv: RecvLink | None = ends.get("backward_recv")
        self.backward_send: SendLink | None = ends.get("backward_send")

    @property
    def sends(self) -> list[SendLink]:
        return [end for end in self if isinstance(end, SendLink)]

    @property
    def receives(self) -> list[RecvLink]:
        return [end for end in self if isinstance(end, RecvLink)]

    def is_known(self, chunk: int) -> bool:
        """Return True if the outputs of this stage for a chunk are kept elsewhere, so they need not be computed."""
        return self.is_repeated and self.sent is not None and self.sent.has(chunk)

    @property
    def forward(self) -> dict[str, Link]:
        """The forward link ends by their names in ``link_state_dict``."""
        return {"sent" if end.route.sends else "received": end for end in self if end.direction == "forward"}

    def place(self, placement: Mapping[int, int], me: int) -> None:
        """Set the worker of each stage: drop links between stages on one worker, unless they have a handover."""
        for end in self:
            end.route.peer = placement[end.route.other_stage]
        ends = self._ends.items()
        self._set({name: end for name, end in ends if end.route.peer != me or end.route.handover is not None})

    def expect(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Configure the forward slots from example tensors before the first step, so that copies can be counted."""
        for name, like in (("received", inputs), ("sent", outputs)):
            if name in self.forward:
                self.forward[name].codec.configure([Slot.of(each) for each in like])

    def drop_gradients(self, *, sent: bool, received: bool) -> None:
        """Drop the links of gradients to be ``sent`` or ``received``, if no stage upstream is trained."""
        dropped = {"backward_send": sent, "backward_recv": received}
        self._set({name: end for name, end in self._ends.items() if not dropped.get(name)})

    def begin_step(self, step: int) -> None:
        self.events.clear()
        for end in self:
            end.begin_step(step)

    def begin_messages(self, training: bool, chunks: int) -> None:
        """Begin the messages of a step with its samples."""
        if self.sent is not None:
            self.sent.begin(self.samples, chunks)
        self.samples = None
        for end in self:
            end.codec.begin_step(end.step, training)

    def traffic(self, training: bool) -> dict[str, Any]:
        """Return the slots that must be equal at both ends before the first tensor is sent."""
        kinds = {"forward": "activations", "backward": "gradients"}
        return {
            f"{kinds[end.direction]} from stage {end.source} to stage {end.target}": list(map(str, end.slots))
            for end in self
            if training or end.direction == "forward"
        }
