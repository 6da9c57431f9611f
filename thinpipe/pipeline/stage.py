"""PipelineStage: torch's stage, connected to its neighbours by links with codecs.

    schedule.step()
      |  clear_runtime_states      (1)  a step opens; before the first one, workers compare their settings
      |  _prepare_*_infra          (2)  first step only: torch infers the shapes, links are configured with them
      |  the first action          (3)  every stage of this worker posts its receives for the step
      |    forward_one_chunk       (4)  wait for the activations of one chunk, decode, compute
      |    get_fwd_send_ops        (5)  encode the output, send it
      |    backward_one_chunk      (6)  wait for the gradients of one chunk, decode, compute
      |    get_bwd_send_ops        (7)  encode the gradients of the inputs, send them
      v  the last action           (8)  the worker's last stage waits until all sends have completed

All of this runs under any schedule of torch: schedules call these methods, in their own order, and start the operations
that the ``get_*_ops`` methods return. If messages have tags (gloo) these return nothing: the links send and receive on
their own, so no schedule makes a transfer wait for a computation. On other backends (NCCL) they return operations on
wire buffers, and the schedule keeps their order.

Private names of torch used here, seen on 2.11 and 2.13; ``linked_stage``, ``shaped_stage``, ``local_stage``
and ``metadata`` list theirs. Overridden: the methods above; ``get_fwd_recv_ops`` and ``get_bwd_recv_ops``;
``forward_maybe_with_nosync``, which runs the module; ``backward_weight_one_chunk``; ``scale_grads`` and
``perform_reduce_grad``, which must not follow an evaluation. Read: ``has_backward``; ``fwd_cache`` and ``bwd_cache``,
outputs and input gradients of each chunk. Written: the ``buffer`` of each of ``args_recv_info`` and
``grad_recv_info``, from which torch takes received tensors. Also ``tree_leaves``, the tensors of an output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from thinpipe.codecs.base import Codec
from thinpipe.codecs.recipes import DEFAULT_RECIPE
from thinpipe.comm.control import ACTIVITY
from thinpipe.comm.group import P2POp
from thinpipe.links.counters import DeviceClock, Event, now
from thinpipe.pipeline.batchnorm import DeferredStatistics, frozen_statistics, tracking_norms
from thinpipe.pipeline.delay import check_delay
from thinpipe.pipeline.local_stage import LocalStage
from thinpipe.pipeline.shaped_stage import drop_buffers
from thinpipe.pipeline.siblings import indices_here, siblings_of
from thinpipe.pipeline.stage_links import LinkOptions


class PipelineStage(LocalStage):
    """A drop-in for ``torch.distributed.pipelining.PipelineStage`` that compresses the tensors it sends.

    Args:
        submodule, stage_index, num_stages, device: as torch's.
        forward: codec of the activations: a spec such as ``"sort:8"``, a preset such as ``"4bit"``, or a Codec. All
            stages must have the same. ``"none"`` sends them uncompressed.
        backward: codec of the gradients, likewise.
        deferred_batch_norm: update running statistics from full mini-batches, not from chunks.
        recompute: keep only the inputs of each chunk and compute its activations again in backward.
        options: of links, those of ``LinkOptions`` (``seed``, ``samples``, ``copies_in``, ``window``, ``post_ahead``);
            and all other options of torch's stage (``group``, ``input_args``, ``output_args`` ...).
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        *torch_args: Any,
        forward: str | Codec = DEFAULT_RECIPE,
        backward: str | Codec = DEFAULT_RECIPE,
        deferred_batch_norm: bool = False,
        recompute: bool = False,
        **options: Any,
    ) -> None:
        device = torch.device(device)
        of_links = {field.name: options.pop(field.name) for field in fields(LinkOptions) if field.name in options}
        links = LinkOptions(forward=forward, backward=backward, **of_links)
        super().__init__(submodule, stage_index, num_stages, device, links, torch_args, options)
        deferred = deferred_batch_norm and tracking_norms(submodule)
        self.statistics = DeferredStatistics(submodule) if deferred else None
        self.recompute = recompute
        self.warns_of_delay = True
        self._held = self._most_held = 0  # chunks whose backward has not run
        self._unsplit = set[int]()  # chunks whose backward was not split into inputs and weights
        self.clocks = {kind: DeviceClock(device) for kind in ("forward", "backward", "weight")}

    def compute_ms(self) -> dict[str, float]:
        """Return the time in the module since ``reset_counters``, by ``forward``, ``backward`` and ``weight``."""
        return {kind: clock.total_ms() for kind, clock in self.clocks.items()}

    # (4) to (7): its actions

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        self.begin()
        return self.links.forward_recv.recv_ops(fwd_chunk_id) if self.links.forward_recv else []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        return self.links.backward_recv.recv_ops(bwd_chunk_id) if self.links.backward_recv and self.has_backward else []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.begin()
        if self.links.is_known(fwd_chunk_id):
            self.fwd_cache[fwd_chunk_id] = ((), [])
            self.count_action()
            return ()
        infos, link = self.args_recv_info[fwd_chunk_id], self.links.forward_recv
        if link:
            gradients = self.has_backward and torch.is_grad_enabled()
            for info, item, tensor in zip(infos, self._inputs, link.receive(fwd_chunk_id), strict=True):
                info.buffer = tensor.requires_grad_(gradients and item.gradient)
        elif not self.is_first:
            self.check_handed_over(infos, "forward", fwd_chunk_id)
        with self._event("forward", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if link:
            link.keep_shared(fwd_chunk_id, tree_leaves(output))
        self._held += 1
        self._most_held = max(self._held, self._most_held)
        self.count_action()
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward_maybe_with_nosync
        if not (self.recompute and self.has_backward):
            return run(*args, **kwargs)
        again = frozen_statistics(self.submod)
        return checkpoint(run, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        if self.links.forward_send:
            operations = self.links.forward_send.send(fwd_chunk_id, self.fwd_cache[fwd_chunk_id][0])
            self.count_action()
            return operations
        if not self.is_last:
            self.neighbour(1).set_local_fwd_input(self.fwd_cache[fwd_chunk_id][0], fwd_chunk_id)
        return []

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        if self.recompute and not full_backward:
            raise ValueError(
                "recompute=True needs unsplit backward passes, but this schedule computes gradients of inputs "
                "and weights separately (zero bubble); leave recompute out or take another schedule"
            )
        if not full_backward and not self.trains_before:
            # torch finds parameters on the paths to inputs that require gradients: without any it would miss some.
            full_backward = True
            self._unsplit.add(bwd_chunk_id)
        if not self.trains_here_or_before:  # torch's stage would raise an error
            self.fwd_cache.pop(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = (None,) * len(self.args_recv_info[bwd_chunk_id])
        else:
            self._receive_gradients(bwd_chunk_id)
            with self._event("backward", bwd_chunk_id):
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            if self.links.backward_recv:
                self.links.backward_recv.keep_shared(bwd_chunk_id, self.bwd_cache[bwd_chunk_id])
        if full_backward:
            self._release(bwd_chunk_id)
            self.count_action()

    def _receive_gradients(self, chunk: int) -> None:
        infos = self.grad_recv_info[chunk]
        if self.links.backward_recv:
            received = iter(self.links.backward_recv.receive(chunk))
            for info in infos:
                info.buffer = None if info.buffer is None else next(received)
        elif not self.is_last:
            self.check_handed_over(infos, "backward", chunk)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        if bwd_chunk_id in self._unsplit:
            self._unsplit.remove(bwd_chunk_id)
            return
        with self._event("weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._release(bwd_chunk_id)
        self.count_action()

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        if not self.has_backward or self.is_first:
            return []
        if self.links.backward_send:
            gradients = [
                gradient if gradient is not None else item.zeros(self.device)
                for item, gradient in zip(self._inputs, self.bwd_cache.pop(bwd_chunk_id), strict=False)
                if item.gradient
            ]
            operations = self.links.backward_send.send(bwd_chunk_id, gradients)
            self.count_action()
            return operations
        if self.stage_index - 1 in indices_here(self):
            self.neighbour(-1).set_local_bwd_input(self.get_local_bwd_output(bwd_chunk_id), bwd_chunk_id)
        return []

    def _release(self, chunk: int) -> None:
        self._held -= 1
        if not self.is_first:
            drop_buffers(self.args_recv_info[chunk])
        drop_buffers(self.grad_recv_info[chunk])
        for link in self.links.receives:
            link.release(chunk)

    # (8): a step ends

    def scale_grads(self, grad_scale_factor: int) -> None:
        if self.has_backward:  # after an evaluation torch would scale the gradients of the last step again
            super().scale_grads(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def end(self) -> None:
        if self.statistics:
            self.statistics.commit()
        if self.is_first and self.steps == 1 and self.has_backward and self.warns_of_delay:
            check_delay(siblings_of(self), self._chunks, self._most_held)
        self._held = 0
        super().end()

    @contextmanager
    def _event(self, kind: str, chunk: int) -> Iterator[None]:
        began = now()
        ACTIVITY.note(f"stage {self.stage_index} {kind}")
        with self.clocks[kind].measure():
            yield
        self.links.events.append(Event(kind, self.stage_index, chunk, began, now()))
