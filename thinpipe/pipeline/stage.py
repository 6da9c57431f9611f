"""PipelineStage: torch's stage, talking to its neighbours through links.

    schedule.step()
      |  clear_runtime_states      (1)  a step opens; before the first one, workers compare their settings
      |  _prepare_*_infra          (2)  first step only: torch learns the shapes, links learn what will travel
      |  the first action          (3)  every stage of this worker posts its receives of the whole step
      |    forward_one_chunk       (4)  wait for the activations of one chunk, decode, compute
      |    get_fwd_send_ops        (5)  encode the output, send it
      |    backward_one_chunk      (6)  wait for the gradients of one chunk, decode, compute
      |    get_bwd_send_ops        (7)  encode the gradients of the inputs, send them
      v  perform_reduce_grad       (8)  the worker's last stage waits until everything sent has left

All of this runs under any schedule of torch: schedules call these methods, in whatever order suits them, and start
the operations that the ``get_*_ops`` methods return. Where messages have tags (gloo) these return nothing: the links
send and receive on their own, so no schedule makes a transfer wait for a computation. On other backends (NCCL) they
return operations on wire buffers, and the schedule keeps their order.

Private names of torch used here, seen on 2.11 and 2.13: ``_prepare_forward_infra`` and ``_prepare_backward_infra``,
the only place where shapes are known before anything travels; ``_get_init_p2p_neighbors_ops``, first messages that 2.11
sends to the wrong worker; ``_stage_meta`` (2.13) and ``get_outputs_meta`` (2.11), the shapes of the outputs;
``tensor_meta`` of a receive info (2.13), which says whether an input has a gradient; ``_send_meta`` and ``_recv_meta``
(2.13), which would exchange pickles to find shapes (``metadata``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from thinpipe.codecs.base import Codec
from thinpipe.codecs.delta import Delta
from thinpipe.codecs.recipes import DEFAULT_RECIPE, backward_codec, forward_codec
from thinpipe.pipeline import metadata
from thinpipe.pipeline.batchnorm import DeferredStatistics, frozen_statistics
from thinpipe.pipeline.copies import SampleCopies, check_samples
from thinpipe.pipeline.counters import DeviceClock, Event, now
from thinpipe.pipeline.expected import Expected
from thinpipe.pipeline.link import Link, RecvLink, SendLink, Slot
from thinpipe.pipeline.metadata import CAN_INFER
from thinpipe.version import __version__
from thinpipe.workers.activity import ACTIVITY
from thinpipe.workers.backend import backend_of, wire_device
from thinpipe.workers.exchange import agree, hear, tell

_NOTHING = torch.empty(0)  # where torch would keep a receive buffer


_STAGES: WeakSet[PipelineStage] = WeakSet()  # all stages of this process


class PipelineStage(pipelining.PipelineStage):
    """A drop-in for ``torch.distributed.pipelining.PipelineStage`` that compresses what it sends.

    Args:
        submodule, stage_index, num_stages, device: as torch's.
        forward: codec of the activations: a spec such as ``"sort:8"``, a recipe such as ``"4bit"``, or a Codec. All
            stages have the same. ``"none"`` sends them as they are.
        backward: codec of the gradients, likewise.
        deferred_batch_norm: running statistics see whole mini-batches, not chunks.
        recompute: keep only the inputs of each chunk and compute its activations again in backward.
        seed: of codecs that round at random (``+sr``). With the same one, a run repeats bit for bit.
        samples: how many different samples there are; ``forward="delta(...)"`` needs to know.
        copies_in: where to keep its copies of them on disk; None: in memory.
        post_ahead: post all receives when a step starts. Needs tags; by default where the backend has them (gloo).
        torch_options: everything else torch's stage takes (``group``, ``input_args``, ``output_args`` ...).
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
        seed: int = 0,
        samples: int | None = None,
        copies_in: Path | None = None,
        post_ahead: bool | None = None,
        **torch_options: Any,
    ) -> None:
        device = torch.device(device)
        super().__init__(submodule, stage_index, num_stages, device, *torch_args, **torch_options)
        static = len(torch_args) >= 2 or {"input_args", "output_args"} <= torch_options.keys()
        if not static and (wire_device(self.group, device).type != device.type or not CAN_INFER):
            raise ValueError(
                f"a stage on {device} under torch {torch.__version__} is told its shapes, as input_args and "
                "output_args: examples of one chunk. Finding them out would need pickles (before torch 2.13), or "
                "tensors on the GPU through gloo, which cannot send them"
            )
        self.forward_codec, self.backward_codec = forward_codec(forward), backward_codec(backward)
        if isinstance(self.backward_codec, Delta):
            raise self.backward_codec.not_for_gradients()
        if isinstance(self.forward_codec, Delta) and samples is None:
            raise ValueError(f"{self.forward_codec} keeps a copy of every sample: say how many there are, samples=N")
        self.sample_count = samples if isinstance(self.forward_codec, Delta) else None
        self._samples: Tensor | None = None  # of the next training step
        self.statistics = DeferredStatistics(submodule) if deferred_batch_norm else None
        self.recompute = recompute
        self.post_ahead = backend_of(self.group, device) == "gloo" if post_ahead is None else post_ahead
        self.events: list[Event] = []  # of the step under way, or of the last one
        self.clocks = {kind: DeviceClock(device) for kind in ("forward", "backward", "weight")}
        self.steps = 0
        self._open = self._posted = self._unchecked = False

        def link(kind: Any, spec: Codec, source: int, target: int) -> Any:
            exists = min(source, target) >= 0 and max(source, target) < num_stages
            return kind(spec, source, target, device, self.group, self.events) if exists else None

        me, before, after = stage_index, stage_index - 1, stage_index + 1
        self.forward_recv: RecvLink | None = link(RecvLink, self.forward_codec, before, me)
        self.forward_send: SendLink | None = link(SendLink, self.forward_codec, me, after)
        self.backward_recv: RecvLink | None = link(RecvLink, self.backward_codec, after, me)
        self.backward_send: SendLink | None = link(SendLink, self.backward_codec, me, before)
        self.set_seed(seed)
        for end in filter(None, (self.forward_recv, self.forward_send)):
            if self.sample_count is not None:
                end.copies = SampleCopies(self.sample_count, copies_in)
        _STAGES.add(self)

    @property
    def links(self) -> list[Link]:
        """The ends of links that this stage has: of those to other workers, once it has run."""
        ends = (self.forward_recv, self.forward_send, self.backward_recv, self.backward_send)
        return [end for end in ends if end]

    def set_seed(self, seed: int) -> None:
        """From the next step on, codecs that round at random draw other numbers."""
        for link in filter(None, (self.forward_send, self.backward_send)):
            link.seed = seed

    def tell_samples(self, samples: Sequence[int] | Tensor) -> None:
        """Which samples the next training step has, in the order of its batch: for ``forward="delta(...)"``.

        All stages of all workers are told the same before ``schedule.step``. An evaluation needs no word: it leaves
        the copies alone, and what it sends travels as a sample's first pass does.
        """
        if self.sample_count is None:
            raise ValueError(f"only delta(...) asks for the samples of a step, and this stage has {self.forward_codec}")
        self._samples = check_samples(samples, self.sample_count)

    def link_state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What this stage's links remember; to be saved beside the module's state.

        ``forward`` and ``backward``: what the codecs do, and the steps so far. ``sent`` and ``received``: copies of
        samples, the same at both ends of a link.
        """
        state = {link.direction: link.state_dict() for link in (self.forward_send, self.backward_send) if link}
        return state | {name: copies.state_dict() for name, copies in self._copies().items()}

    def load_link_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        for link in filter(None, (self.forward_send, self.backward_send)):
            link.load_state_dict(state.get(link.direction, {}))
        for name, copies in self._copies().items():
            copies.load_state_dict(state.get(name, {}))

    def _copies(self) -> dict[str, SampleCopies]:
        ends = {"sent": self.forward_send, "received": self.forward_recv}
        return {name: end.copies for name, end in ends.items() if end is not None and end.copies is not None}

    def trace(self, on: bool = True) -> None:
        """From the next step on, also stamp the arrival of each message (``report``, ``draw``)."""
        for link in filter(None, (self.forward_recv, self.backward_recv)):
            link.trace = on

    def compute_ms(self) -> dict[str, float]:
        """Time in the module since ``reset_counters``, apart for ``forward``, ``backward`` and ``weight``."""
        return {kind: clock.total_ms() for kind, clock in self.clocks.items()}

    # (1) to (3): a step begins

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        if self.steps == 0:
            self._place_links()
            if self.stage_index == max(self._local_indices()):
                self._agree(stage._settings() for stage in self._local_stages())
        self.steps += 1
        self.events.clear()
        self._open, self._posted = True, False
        for link in self.links:
            link.step = self.steps
            link.begin_step()

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        if self.stage_index == min(self._local_indices()):
            self._agree([{"chunks per step": num_microbatches, "backward pass": self.has_backward}])
        # torch 2.11 asks for gradients of all receive buffers, integers too, if the stage has a backward: let it think
        # there is none, forward_one_chunk decides per tensor. Both versions run the module on made-up inputs here.
        has_backward, self.has_backward = self.has_backward, False
        with frozen_statistics(self.submod):
            result = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        self.has_backward = has_backward
        self._chunks, self._unchecked = num_microbatches, True
        if self.forward_recv:
            self._inputs = self._take_over(self.forward_recv, self.args_recv_info)
        if self.forward_send:
            outputs: Any = self._stage_meta.outputs if hasattr(self, "_stage_meta") else self.get_outputs_meta()  # type: ignore[attr-defined]
            self.forward_send.configure([Slot.of(meta, self.forward_codec) for meta in outputs], num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        with frozen_statistics(self.submod):
            result = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        if self.backward_send:
            slots = [Slot.of(received, self.backward_codec) for received in self._inputs if received.gradient]
            self.backward_send.configure(slots, num_microbatches)
        if self.backward_recv:
            self._take_over(self.backward_recv, self.grad_recv_info)
        return result

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
        inputs = [Expected.of(info) for info in infos[0]]
        travelling = [item for item in inputs if link.direction == "forward" or item.gradient]
        link.configure([Slot.of(item, link.codec) for item in travelling], self._chunks)
        for chunk in infos.values():
            for info, item in zip(chunk, inputs, strict=True):
                info.buffer = _NOTHING if item in travelling else None
        return inputs

    def _begin(self) -> None:
        """(3) Called by every action: the first one of a step posts the receives of all stages of this worker."""
        if self._posted:
            return
        stages = [stage for stage in self._local_stages() if stage._open and not stage._posted]
        if any(stage._unchecked for stage in stages):
            self._agree(stage._traffic() for stage in stages)
        for stage in stages:
            stage._posted, stage._unchecked = True, False
            stage._begin_samples()
            if stage.post_ahead:
                for link in stage.links:
                    if isinstance(link, RecvLink) and (stage.has_backward or link.direction == "forward"):
                        link.post()

    def _begin_samples(self) -> None:
        if self.sample_count is None:
            return
        samples = None
        if self.has_backward:
            samples, self._samples = self._samples, None
            if samples is None:
                raise ValueError(
                    f"{self.forward_codec} sends what changed of each sample: before a training step tell all stages "
                    f"which ones it has, stage.tell_samples(indices); stage {self.stage_index} was told nothing"
                )
        for link in filter(None, (self.forward_recv, self.forward_send)):
            link.begin_samples(samples, self._chunks)

    # (4) to (7): its actions

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._begin()
        if not self.forward_recv or self.post_ahead:
            return []
        return self.forward_recv.recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.backward_recv or not self.has_backward or self.post_ahead:
            return []
        return self.backward_recv.recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        if self.forward_recv:
            gradients = self.has_backward and torch.is_grad_enabled()
            received = self.forward_recv.receive(fwd_chunk_id)
            for info, item, tensor in zip(self.args_recv_info[fwd_chunk_id], self._inputs, received, strict=True):
                info.buffer = tensor.requires_grad_(gradients and item.gradient)
        with self._event("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward_maybe_with_nosync
        if not (self.recompute and self.has_backward):
            return run(*args, **kwargs)
        again = frozen_statistics(self.submod)
        return checkpoint(run, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.forward_send:
            return []
        outputs = self.fwd_cache[fwd_chunk_id][0]
        if not self.post_ahead:
            return self.forward_send.send_ops(fwd_chunk_id, outputs)
        self.forward_send.send(fwd_chunk_id, outputs)
        if not self.has_backward and fwd_chunk_id == self._chunks - 1 and len(self._local_indices()) == 1:
            self.forward_send.finish()  # torch's forward-only schedule never gets to (8)
        return []

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        if self.recompute and not full_backward:
            raise ValueError(
                "recompute=True needs whole backwards, but this schedule computes gradients of inputs and weights "
                "apart (zero bubble); leave recompute out or take another schedule"
            )
        if self.backward_recv:
            received = iter(self.backward_recv.receive(bwd_chunk_id))
            for info in self.grad_recv_info[bwd_chunk_id]:
                info.buffer = None if info.buffer is None else next(received)
        with self._event("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._release(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._event("weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._release(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.backward_send or not self.has_backward:
            return []
        gradients = [
            gradient if gradient is not None else item.zeros(self.device)
            for item, gradient in zip(self._inputs, self.bwd_cache.pop(bwd_chunk_id), strict=False)
            if item.gradient
        ]
        if not self.post_ahead:
            return self.backward_send.send_ops(bwd_chunk_id, gradients)
        self.backward_send.send(bwd_chunk_id, gradients)
        return []

    def _release(self, chunk: int) -> None:
        for link, infos in ((self.forward_recv, self.args_recv_info), (self.backward_recv, self.grad_recv_info)):
            if link:
                for info in infos[chunk]:
                    info.buffer = None if info.buffer is None else _NOTHING
                link.release(chunk)

    # (8): a step ends

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:  # after an evaluation torch would scale the gradients of the last step again
            super().perform_reduce_grad(grad_scale_factor)
        if self.statistics:
            self.statistics.commit()
        self._open = False
        stages = self._local_stages()
        if not any(stage._open for stage in stages):
            for link in itertools.chain.from_iterable(stage.links for stage in stages):
                if isinstance(link, SendLink):
                    link.finish()

    # What this worker has, and what it tells the others

    def _local_indices(self) -> list[int]:
        return [stage for stage, worker in self.stage_index_to_group_rank.items() if worker == self.group_rank]

    def _local_stages(self) -> list[PipelineStage]:
        """The stages this worker runs together with this one."""
        # A schedule gives all its stages one and the same placement; other pipelines of this process have others.
        placement = self.stage_index_to_group_rank
        together = [stage for stage in _STAGES if stage.stage_index_to_group_rank is placement]
        return sorted(together, key=lambda stage: stage.stage_index)

    def _place_links(self) -> None:
        placement = self.stage_index_to_group_rank
        if placement[self.stage_index] != self.group_rank:
            raise ValueError(
                f"stage {self.stage_index} of {self.num_stages} belongs to worker {placement[self.stage_index]} of "
                f"{self.group_size} under this schedule, but worker {self.group_rank} made it; "
                f"make {' and '.join(f'stage {index}' for index in self._local_indices())} here"
            )
        for name, end in (("forward_recv", -1), ("backward_send", -1), ("forward_send", 1), ("backward_recv", 1)):
            link = getattr(self, name)
            if link:
                link.peer = placement[self.stage_index + end]
                if link.peer == self.group_rank:  # neighbours on one worker, in V schedules: nothing travels
                    setattr(self, name, None)

    def _agree(self, facts: Iterable[dict[str, Any]]) -> None:
        agree(dict(itertools.chain.from_iterable(known.items() for known in facts)), self.group, self.device)

    def _settings(self) -> dict[str, Any]:
        """What must be the same everywhere before shapes are known."""
        plan = getattr(self.submod, "plan", None)
        return {
            "thinpipe version": __version__,
            "number of stages": self.num_stages,
            "worker of each stage": [self.stage_index_to_group_rank[stage] for stage in range(self.num_stages)],
            "forward codec": self.forward_codec.spec,
            "backward codec": self.backward_codec.spec,
            "samples with copies": self.sample_count,
        } | ({"model and cuts": plan} if plan else {})

    def _traffic(self) -> dict[str, Any]:
        """What must be the same at both ends before the first tensor travels."""
        kinds = {"forward": "activations", "backward": "gradients"}
        return {
            f"{kinds[link.direction]} from stage {link.source} to stage {link.target}": list(map(str, link.slots))
            for link in self.links
            if self.has_backward or link.direction == "forward"
        }

    @contextmanager
    def _event(self, kind: str, chunk: int) -> Iterator[None]:
        began = now()
        ACTIVITY.note(f"stage {self.stage_index} {kind}")
        with self.clocks[kind].measure():
            yield
        self.events.append(Event(kind, self.stage_index, chunk, began, now()))
