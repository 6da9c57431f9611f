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
from thinpipe.links.counters import Event
from thinpipe.links.delta import check_samples
from thinpipe.links.link import Link
from thinpipe.links.recv import RecvLink
from thinpipe.links.send import SendLink
from thinpipe.links.slot import Handover, Route, Slot
from thinpipe.links.spec import check_directions, encoding


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The options of the links of a stage."""

    forward: str | Codec
    backward: str | Codec
    seed: int = 0  # of stochastic rounding (``+sr``). With the same seed, runs are bit-identical
    samples: int | None = None  # number of different samples: needed by ``forward="delta(...)"``
    copies_in: Path | None = None  # directory for copies of samples on disk; None: in memory
    window: int = SendLink.window  # chunks in transit on a link before the worker waits for the oldest
    post_ahead: bool | None = None  # post all receives at the start of a step; None: if messages have tags (gloo)
    handover: Handover | None = None  # through which stages of one process exchange wires


class StageLinks:
    """The link ends of one stage; an end is None if there is no such neighbour."""

    def __init__(self, stage: int, stages: int, device: torch.device, group: Any, options: LinkOptions) -> None:
        forward, backward = options.forward, options.backward
        forward = directions(forward)[0] if isinstance(forward, str) else forward
        backward = directions(backward)[1] if isinstance(backward, str) else backward
        check_directions(forward, backward)
        self.forward_spec, self.backward_spec = encoding(forward).spec, encoding(backward).spec
        self.needs_samples = encoding(forward).needs_samples
        if self.needs_samples and options.samples is None:
            raise ValueError(f"{self.forward_spec} keeps a copy of every sample: say how many there are, samples=N")
        self.sample_count = options.samples if self.needs_samples else None
        self.stage, self.events = stage, list[Event]()  # of the current or the last step
        self._samples: Tensor | None = None  # of the next training step

        ahead = capabilities_of(group, device).tags if options.post_ahead is None else options.post_ahead

        def end(kind: Any, source: int, target: int) -> Any:
            if min(source, target) < 0 or max(source, target) >= stages:
                return None
            spec = forward if target > source else backward
            codes = encoding(spec, samples=self.sample_count, copies_in=options.copies_in)
            route = Route(source, target, kind is SendLink, device, group, handover=options.handover)
            return kind(codes, route, self.events, scheduled=not ahead)

        self.forward_recv: RecvLink | None = end(RecvLink, stage - 1, stage)
        self.forward_send: SendLink | None = end(SendLink, stage, stage + 1)
        self.backward_recv: RecvLink | None = end(RecvLink, stage + 1, stage)
        self.backward_send: SendLink | None = end(SendLink, stage, stage - 1)
        for send in self.sends:
            send.window = options.window
        self.set_seed(options.seed)

    def __iter__(self) -> Iterator[Link]:
        ends = (self.forward_recv, self.forward_send, self.backward_recv, self.backward_send)
        return (end for end in ends if end)

    @property
    def sends(self) -> list[SendLink]:
        return [end for end in (self.forward_send, self.backward_send) if end]

    @property
    def receives(self) -> list[RecvLink]:
        return [end for end in (self.forward_recv, self.backward_recv) if end]

    @property
    def _forward(self) -> dict[str, Link]:
        """The forward link ends by their names in ``state_dict``."""
        ends: dict[str, Link | None] = {"sent": self.forward_send, "received": self.forward_recv}
        return {name: end for name, end in ends.items() if end}

    def place(self, placement: Mapping[int, int], me: int) -> None:
        """Set the worker of each stage: drop links between stages on one worker, unless they have a handover."""
        for name in ("forward_recv", "forward_send", "backward_recv", "backward_send"):
            end: Link | None = getattr(self, name)
            if end:
                end.route.peer = placement[end.route.other_stage]
                if end.route.peer == me and end.route.handover is None:
                    setattr(self, name, None)

    def expect(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Configure the forward slots from example tensors before the first step, so that copies can be counted."""
        for name, like in (("received", inputs), ("sent", outputs)):
            if name in self._forward:
                self._forward[name].encoding.configure([Slot.of(each) for each in like])

    def drop_gradients(self, *, sent: bool, received: bool) -> None:
        """Drop the links of gradients to be ``sent`` or ``received``, if no stage upstream is trained."""
        self.backward_send = None if sent else self.backward_send
        self.backward_recv = None if received else self.backward_recv

    def expect_step(self) -> None:
        """Post the receives of the next step, which must be a training step like the last.

        Otherwise receives are posted by the first action of the step, and senders wait for that.
        """
        for end in self.receives:
            end.expect_step()

    def cancel_prefetch(self) -> None:
        """Cancel the expected step; all workers must do so."""
        for send in self.sends:
            send.cancel_prefetch()
        for receive in self.receives:
            receive.cancel_prefetch()

    def begin_step(self, step: int) -> None:
        self.events.clear()
        for end in self:
            end.begin_step(step)

    def tell_samples(self, samples: Sequence[int] | Tensor) -> None:
        if self.sample_count is None:
            raise ValueError(f"only delta(...) asks for the samples of a step, and this stage has {self.forward_spec}")
        self._samples = check_samples(samples, self.sample_count)

    def begin_traffic(self, training: bool) -> None:
        """Begin the messages of a step with the samples set by ``tell_samples``; an evaluation has none."""
        for end in self:
            end.encoding.begin_traffic(training)
        if not self.needs_samples:
            return
        samples = None
        if training:
            samples, self._samples = self._samples, None
            if samples is None:
                raise ValueError(
                    f"{self.forward_spec} sends what changed of each sample: before a training step tell all stages "
                    f"which ones it has, stage.tell_samples(indices); stage {self.stage} was told nothing"
                )
        for side in self._forward.values():
            side.begin_samples(samples)

    def set_seed(self, seed: int) -> None:
        for end in self.sends:
            end.encoding.seed = seed

    def copies_bytes(self) -> int:
        return sum(end.encoding.copies_bytes() for end in self._forward.values())

    def reserve_copies(self) -> None:
        for end in self._forward.values():
            end.encoding.reserve_copies()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        state = {end.direction: end.encoding.state_dict() for end in self.sends}
        shared = {name: end.encoding.shared_state_dict() for name, end in self._forward.items()}
        return state | {name: kept for name, kept in shared.items() if kept}

    def load_state_dict(self, state: Mapping[str, dict[str, Tensor]]) -> None:
        for end in self.sends:
            end.encoding.load_state_dict(state.get(end.direction, {}))
        for name, side in self._forward.items():
            side.encoding.load_shared_state_dict(state.get(name, {}))

    def traffic(self, training: bool) -> dict[str, Any]:
        """Return the slots that must be equal at both ends before the first tensor is sent."""
        kinds = {"forward": "activations", "backward": "gradients"}
        return {
            f"{kinds[end.direction]} from stage {end.source} to stage {end.target}": list(map(str, end.slots))
            for end in self
            if training or end.direction == "forward"
        }
