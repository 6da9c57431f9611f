"""A link whose two ends are in one process: a wire stays where it is."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from thinpipe.pipeline.links.counters import now
from thinpipe.pipeline.links.message import Message
from thinpipe.pipeline.links.transport import Transport


class Within(Transport):
    """Both ends are in one process, and what is sent is received next."""

    ahead = False

    def begin_step(self) -> None:
        """Nothing is under way."""

    def send(self, messages: list[Message]) -> list[dist.P2POp]:
        assert self.route.handover is not None
        self.seal(messages)
        for message in messages:
            self.route.handover[self.route.tag(message.chunk, message.slot)] = message.buffer
        return []

    def await_sends(self, but: int = 0) -> None:
        """They have arrived."""

    def post(self, messages: Iterable[Message], trace: bool) -> None:
        list(messages)  # their link notes each as it is drawn; the sender brings the memory

    def recv_ops(self, messages: Iterable[Message]) -> list[dist.P2POp]:
        return []

    def receive(self, message: Message) -> None:
        assert self.route.handover is not None
        message.needed = message.usable = now()
        message.room = message.buffer = self.route.handover.pop(self.route.tag(message.chunk, message.slot))
