"""A pipeline stage that configures its links with the shapes of inputs, outputs and gradients, (2) of ``stage``.

Private names of torch used here, seen on 2.11 and 2.13. Overridden: ``_prepare_forward_infra`` and
``_prepare_backward_infra``, the only place where shapes are known before anything is sent;
``_get_init_p2p_neighbors_ops``, first messages that 2.11 sends to the wrong worker; ``_send_meta`` and ``_recv_meta``
(2.13), which would exchange pickles to find shapes (``metadata``); ``_to_tensor`` (2.13), which makes tensors of these
shapes. Read: ``stage_index_to_group_rank``, where the schedule puts stages; ``group_rank`` and ``has_backward``;
``_stage_meta`` (2.13) and ``get_outputs_meta`` (2.11), the shapes of the outputs. Written: the ``buffer`` of each of
``args_recv_info`` and ``grad_recv_info``, from which torch takes received tensors; ``_user_meta`` (2.13), the shapes of
the examples, and which of them have gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from thinpipe.comm.backend import capabilities_of, wire_device
from thinpipe.comm.group import Group, P2POp
from thinpipe.links.recv import RecvLink
from thinpipe.links.slot import Slot
from thinpipe.pipeline import metadata
from thinpipe.pipeline.batchnorm import frozen_statistics
from thinpipe.pipeline.metadata import CAN_INFER, Expected
from thinpipe.pipeline.siblings import agree, indices_here
from thinpipe.pipeline.stage_links import LinkOptions, StageLinks

NOTHING = torch.empty(0)  # in place of a receive buffer of torch
TorchStage = pipelining.PipelineStage  # for stages of other packages, which do not name torch.distributed


class ShapedStage(TorchStage):
    """A stage that configures its links as soon as torch knows the shapes of the tensors to be sent."""

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
        given = dict(zip(("input_args", "output_args"), torch_args, strict=False)) | dict(torch_options)
        shapes = [given.get(name) for name in ("input_args", "output_args")]
        if any(each is None for each in shapes) and (
            wire_device(self.group, device).type != device.type or not CAN_INFER
        ):
            raise ValueError(
                f"a stage on {device} under torch {torch.__version__} needs its shapes, as input_args and "
                "output_args: examples of one chunk. Inferring them would need pickles (before torch 2.13), or "
                "tensors on the GPU through gloo, which cannot send them"
            )
        self.links = StageLinks(stage_index, num_stages, device, self.group, options)
        if all(each is not None for each in shapes):
            self.links.expect(*(each if isinstance(each, tuple | list) else (each,) for each in shapes))
        self._chunks = 0
        self._inputs: list[Expected] = []
        self._trains: list[bool] = []  # for each stage of the pipeline: True if it has trainable parameters
        self._unchecked = False  # workers have not compared their slots yet

    @property
    def is_trained(self) -> bool:
        """True if any parameter of this stage requires gradients."""
        return any(each.requires_grad for each in self.submod.parameters())

    @property
    def trains_before(self) -> bool:
        """True if a stage before this one is trained: otherwise inputs need no gradient, and none is sent."""
        return any(self._trains[: self.stage_index])

    @property
    def trains_here_or_before(self) -> bool:
        """True if this stage or one before it is trained: otherwise it receives no gradient and runs no backward."""
        return any(self._trains[: self.stage_index + 1])

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        if self.stage_index == min(indices_here(self)):
            agree(self, [{"chunks per step": num_microbatches, "backward pass": self.has_backward}])
        # torch 2.11 requires gradients of all receive buffers, integers too, if the stage has a backward: pretend there
        # is none, forward_one_chunk decides per tensor. Both versions run the module on dummy inputs here.
        has_backward, self.has_backward = self.has_backward, False
        if has_backward and CAN_INFER:
            metadata.expect_gradients(self._user_meta, inputs=self.trains_before, outputs=self.trains_here_or_before)
        with frozen_statistics(self.submod):
            result = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        self.has_backward = has_backward
        self._chunks, self._unchecked = num_microbatches, True
        if self.links.forward_recv:
            self._inputs = self._take_over(self.links.forward_recv, self.args_recv_info)
        self._drop_local_buffers()
        if self.links.forward_send:
            me: Any = self  # the attribute depends on the version
            outputs = me._stage_meta.outputs if hasattr(me, "_stage_meta") else me.get_outputs_meta()
            self.links.forward_send.configure([Slot.of(meta) for meta in outputs], num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        with frozen_statistics(self.submod):
            result = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        if self.links.backward_send:
            slots = [Slot.of(received) for received in self._inputs if received.gradient]
            self.links.backward_send.configure(slots, num_microbatches)
        if self.links.backward_recv:
            self._take_over(self.links.backward_recv, self.grad_recv_info)
        self._drop_local_buffers()
        self.links.drop_gradients(sent=not self.trains_before, received=not self.trains_here_or_before)
        return result

    def _to_tensor(self, arg: Any) -> Tensor:
        tensor = super()._to_tensor(arg)
        if tensor.is_complex() and not isinstance(arg, Tensor):  # torch makes only floats require gradients
            tensor.requires_grad_(arg.requires_grad)
        return tensor

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        Group.of(self.group, self.device).send_json(metadata.to_json(meta), self.stage_index_to_group_rank[dst_stage])

    def _recv_meta(self, src_stage: int) -> Any:
        return metadata.from_json(
            Group.of(self.group, self.device).receive_json(self.stage_index_to_group_rank[src_stage])
        )

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        # torch 2.11 sends to both neighbours so that NCCL connects: also to itself in V schedules, and with tensors on
        # the GPU; gloo supports neither. Groups of gloo are connected from the start.
        if capabilities_of(self.group, self.device).preconnected:
            return []
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _take_over(self, link: RecvLink, infos: dict[int, Any]) -> list[Expected]:
        """Configure a link from torch's receive buffers, and drop these: the link has its own."""
        trained = self.trains_before if link.direction == "forward" else self.trains_here_or_before
        inputs = [Expected.of(info, trained) for info in infos[0]]
        crossing = [item for item in inputs if link.direction == "forward" or item.gradient]
        link.configure([Slot.of(item) for item in crossing], self._chunks)
        for chunk in infos.values():
            for info, item in zip(chunk, inputs, strict=True):
                info.buffer = NOTHING if item in crossing else None
        return inputs

    def _drop_local_buffers(self) -> None:
        """Drop torch's receive buffers for a neighbour on this worker, which hands over tensors directly."""
        for infos, is_local in (
            (self.args_recv_info, not (self.is_first or self.links.forward_recv)),
            (self.grad_recv_info, not (self.is_last or self.links.backward_recv)),
        ):
            for chunk in infos.values() if is_local else ():
                drop_buffers(chunk)


def drop_buffers(infos: Sequence[Any]) -> None:
    """Replace the buffers of receive infos, if there are any, by NOTHING."""
    for info in infos:
        info.buffer = None if info.buffer is None else NOTHING
