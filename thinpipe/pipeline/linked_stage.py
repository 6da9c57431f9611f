"""torch's stage with the ends of its links: what happens before the first action of a step, (1) to (3) of ``stage``.

Names of torch's inside used here and in ``siblings``, seen on 2.11 and 2.13. Overridden: ``clear_runtime_states``,
which opens a step; ``_prepare_forward_infra`` and ``_prepare_backward_infra``, the only place where shapes are known
before anything travels; ``_get_init_p2p_neighbors_ops``, first messages that 2.11 sends to the wrong worker;
``_send_meta`` and ``_recv_meta`` (2.13), which would exchange pickles to find shapes (``metadata``); ``_to_tensor``
(2.13), which makes tensors of these shapes. Read: ``stage_index_to_group_rank``, where the schedule puts stages;
``group_rank``, ``group_size`` and ``has_backward``; ``_stage_meta`` (2.13) and ``get_outputs_meta`` (2.11), the shapes
of the outputs. Written: the ``buffer`` of each of ``args_recv_info`` and ``grad_recv_info``, from which torch takes
what arrived; ``_user_meta`` (2.13), the shapes of the examples, and which of them have gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from thinpipe.pipeline import metadata
from thinpipe.pipeline.batchnorm import frozen_statistics
from thinpipe.pipeline.ends import Ends, LinkOptions
from thinpipe.pipeline.links.counters import Event
from thinpipe.pipeline.links.link import Link
from thinpipe.pipeline.links.recv import RecvLink
from thinpipe.pipeline.links.slot import Slot
from thinpipe.pipeline.metadata import CAN_INFER, Expected
from thinpipe.pipeline.siblings import agree, check_place, indices_here, register, siblings_of
from thinpipe.version import __version__
from thinpipe.workers.exchange import backend_of, hear, tell, wire_device

NOTHING = torch.empty(0)  # where torch would keep a receive buffer


class LinkedStage(pipelining.PipelineStage):
    """Knows its links, and has agreed with all workers on what travels over them."""

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        options: LinkOptions,
        torch_args: Sequence[Any],
        torch_options: Mapping[str, Any],
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, *torch_args, **torch_options)
        told = dict(zip(("input_args", "output_args"), torch_args, strict=False)) | dict(torch_options)
        shapes = [told.get(name) for name in ("input_args", "output_args")]
        if any(each is None for each in shapes) and (
            wire_device(self.group, device).type != device.type or not CAN_INFER
        ):
            raise ValueError(
                f"a stage on {device} under torch {torch.__version__} is told its shapes, as input_args and "
                "output_args: examples of one chunk. Finding them out would need pickles (before torch 2.13), or "
                "tensors on the GPU through gloo, which cannot send them"
            )
        self.ends = Ends(stage_index, num_stages, device, self.group, options)
        if all(each is not None for each in shapes):
            self.ends.expect(*(each if isinstance(each, tuple | list) else (each,) for each in shapes))
        self.steps = 0
        self._chunks = 0
        self._inputs: list[Expected] = []
        self._trains: list[bool] = []  # of every stage of the pipeline, whether it has parameters that are trained
        self._placement: dict[int, int] = {}  # the worker of each stage, as the links were set up for it
        self._actions_left = 0  # of the step under way
        self._open = self._posted = self._unchecked = False
        register(self)

    @property
    def links(self) -> list[Link]:
        """The ends of links that this stage has: of those to other workers, once it has run."""
        return list(self.ends)

    @property
    def events(self) -> list[Event]:
        """Of the step under way, or of the last one."""
        return self.ends.events

    def set_seed(self, seed: int) -> None:
        """From the next step on, codecs that round at random draw other numbers."""
        self.ends.set_seed(seed)

    @property
    def needs_samples(self) -> bool:
        """Whether ``tell_samples`` is to be called before each training step."""
        return self.ends.needs_samples

    def tell_samples(self, samples: Sequence[int] | Tensor) -> None:
        """Which samples the next training step has, in the order of its batch: for ``forward="delta(...)"``.

        All stages of all workers are told the same before ``schedule.step``. An evaluation needs no word: it leaves
        the copies alone, and what it sends travels as a sample's first pass does.
        """
        self.ends.tell_samples(samples)

    def copies_bytes(self) -> int:
        """What this stage will keep of all samples; known before the first step if it was told its shapes."""
        return self.ends.copies_bytes()

    def reserve_copies(self) -> None:
        """Allocate that now, not in the first step."""
        self.ends.reserve_copies()

    def link_state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What this stage's links remember; to be saved beside the module's state.

        ``forward`` and ``backward``: what the codecs do, and the steps so far. ``sent`` and ``received``: copies of
        samples, the same at both ends of a link.
        """
        return self.ends.state_dict()

    def load_link_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        self.ends.load_state_dict(state)

    def trace(self, on: bool = True) -> None:
        """From the next step on, also stamp the arrival of each message (``report``, ``draw``)."""
        for link in self.ends.receives:
            link.trace = on

    # (1) A step opens

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        if self.steps == 0:
            check_place(self)
            self._placement = dict(self.stage_index_to_group_rank)
            self.ends.place(self._placement, self.group_rank)
            if self.stage_index == max(indices_here(self)):
                known = agree(self, (stage._settings() for stage in siblings_of(self)))
                for stage in siblings_of(self):
                    stage._trains = [known[_trains(index)] for index in range(self.num_stages)]
        elif self._placement != self.stage_index_to_group_rank:
            raise ValueError(
                f"a stage keeps its links and its neighbours: stage {self.stage_index} ran with its stages on workers "
                f"{_workers(self._placement)} and now has a schedule that places them on "
                f"{_workers(self.stage_index_to_group_rank)}. Make new stages for another placement"
            )
        elif self.is_trained and not self._trains[self.stage_index]:
            raise ValueError(
                f"links are set up for the stages that were trained in the first step: stage {self.stage_index} was "
                "frozen then, and some of its parameters require gradients now. Make new stages to train it"
            )
        self.steps += 1
        self._drop_local_buffers()  # an evaluation keeps what it was handed
        self._open, self._posted = True, False
        self.ends.begin_step(self.steps)

    def _settings(self) -> dict[str, Any]:
        """What must be the same everywhere before shapes are known."""
        plan = getattr(self.submod, "plan", None)
        return {
            "thinpipe version": __version__,
            "number of stages": self.num_stages,
            "worker of each stage": [self.stage_index_to_group_rank[stage] for stage in range(self.num_stages)],
            "forward codec": self.ends.forward_spec,
            "backward codec": self.ends.backward_spec,
            "samples with copies": self.ends.sample_count,
            _trains(self.stage_index): self.is_trained,
        } | ({"model and cuts": plan} if plan else {})

    @property
    def is_trained(self) -> bool:
        """Whether any parameter of this stage requires gradients."""
        return any(each.requires_grad for each in self.submod.parameters())

    @property
    def trains_before(self) -> bool:
        """Whether a stage before this one is trained: otherwise inputs need no gradient, and none is sent."""
        return any(self._trains[: self.stage_index])

    @property
    def trains_here_or_before(self) -> bool:
        """The same with this stage: otherwise no gradient comes, and there is no backward."""
        return any(self._trains[: self.stage_index + 1])

    # (2) Shapes

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        if self.stage_index == min(indices_here(self)):
            agree(self, [{"chunks per step": num_microbatches, "backward pass": self.has_backward}])
        # torch 2.11 asks for gradients of all receive buffers, integers too, if the stage has a backward: let it think
        # there is none, forward_one_chunk decides per tensor. Both versions run the module on made-up inputs here.
        has_backward, self.has_backward = self.has_backward, False
        if has_backward and CAN_INFER:
            metadata.expect_gradients(self._user_meta, inputs=self.trains_before, outputs=self.trains_here_or_before)
        with frozen_statistics(self.submod):
            result = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        self.has_backward = has_backward
        self._chunks, self._unchecked = num_microbatches, True
        if self.ends.forward_recv:
            self._inputs = self._take_over(self.ends.forward_recv, self.args_recv_info)
        self._drop_local_buffers()
        if self.ends.forward_send:
            me: Any = self  # the name depends on the version
            outputs = me._stage_meta.outputs if hasattr(me, "_stage_meta") else me.get_outputs_meta()
            self.ends.forward_send.configure([Slot.of(meta) for meta in outputs], num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        with frozen_statistics(self.submod):
            result = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        if self.ends.backward_send:
            slots = [Slot.of(received) for received in self._inputs if received.gradient]
            self.ends.backward_send.configure(slots, num_microbatches)
        if self.ends.backward_recv:
            self._take_over(self.ends.backward_recv, self.grad_recv_info)
        self._drop_local_buffers()
        self.ends.drop_gradients(sent=not self.trains_before, received=not self.trains_here_or_before)
        return result

    def _to_tensor(self, arg: Any) -> Tensor:
        tensor = super()._to_tensor(arg)
        if tensor.is_complex() and not isinstance(arg, Tensor):  # torch makes only floats require gradients
            tensor.requires_grad_(arg.requires_grad)
        return tensor

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        tell(metadata.to_json(meta), self.group, self.stage_index_to_group_rank[dst_stage], self.device)

    def _recv_meta(self, src_stage: int) -> Any:
        return metadata.from_json(hear(self.group, self.stage_index_to_group_rank[src_stage], self.device))

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # torch 2.11 greets both neighbours so that NCCL connects: also itself in V schedules, and with tensors on the
        # GPU, neither of which gloo can. Groups of gloo are connected from the start.
        if backend_of(self.group, self.device) == "gloo":
            return []
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _take_over(self, link: RecvLink, infos: dict[int, Any]) -> list[Expected]:
        """Learn from torch's receive buffers what will come, and drop them: the link has its own."""
        trained = self.trains_before if link.direction == "forward" else self.trains_here_or_before
        inputs = [Expected.of(info, trained) for info in infos[0]]
        travelling = [item for item in inputs if link.direction == "forward" or item.gradient]
        link.configure([Slot.of(item) for item in travelling], self._chunks)
        for chunk in infos.values():
            for info, item in zip(chunk, inputs, strict=True):
                info.buffer = NOTHING if item in travelling else None
        return inputs

    def _drop_local_buffers(self) -> None:
        """Drop torch's receive buffers for a neighbour on this worker, which hands over tensors instead."""
        for infos, is_local in (
            (self.args_recv_info, not (self.is_first or self.ends.forward_recv)),
            (self.grad_recv_info, not (self.is_last or self.ends.backward_recv)),
        ):
            for chunk in infos.values() if is_local else ():
                drop_buffers(chunk)

    # (3) The first action

    def begin(self) -> None:
        """Called by every action: the first one of a step posts the receives of all stages of this worker."""
        if self._posted:
            return
        stages = [stage for stage in siblings_of(self) if stage._open and not stage._posted]
        if any(stage._unchecked for stage in stages):
            agree(self, (stage.ends.traffic(stage.has_backward) for stage in stages))
        for stage in stages:
            stage._posted, stage._unchecked = True, False
            stage._actions_left = stage._chunks * stage._actions_per_chunk()
            stage.ends.begin_traffic(stage.has_backward)
            for link in stage.ends.receives:
                if stage.has_backward or link.direction == "forward":
                    link.post()

    # (8) Its end

    def _actions_per_chunk(self) -> int:
        """Return the number of forwards, backwards and sends of a chunk; each calls ``count_action``."""
        forward = 1 + bool(self.ends.forward_send)
        return forward + (1 + bool(self.ends.backward_send) if self.has_backward else 0)

    def count_action(self) -> None:
        """End the step after its last action, of which torch's schedules inform a stage only if they train."""
        self._actions_left -= 1
        if self._actions_left == 0:
            self.end()

    def end(self) -> None:
        """End the step; the last stage of this worker waits until everything sent has left."""
        self._open = False
        stages = siblings_of(self)
        if not any(stage._open for stage in stages):
            for stage in stages:
                for link in stage.ends.sends:
                    link.finish()


def drop_buffers(infos: Sequence[Any]) -> None:
    """Replace the buffers of receive infos, where there are any, by NOTHING."""
    for info in infos:
        info.buffer = None if info.buffer is None else NOTHING


def _workers(placement: Mapping[int, int]) -> str:
    return ", ".join(str(placement[stage]) for stage in sorted(placement))


def _trains(stage: int) -> str:
    """The name of a fact that workers tell each other."""
    return f"whether stage {stage} is trained"
