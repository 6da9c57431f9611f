"""The replica engine: the full model on this worker, alone or as one of several replicas with averaged gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinpipe.comm.control import waiting
from thinpipe.ddp import DDPState, ddp_hook, ddp_state
from thinpipe.links.link_codec import warm_codec
from thinpipe.pipeline.batchnorm import DeferredStatistics
from thinpipe.pipeline.partition import cut_units
from thinpipe.train.engines.engine import Engine, NamedModule, to_device
from thinpipe.train.engines.finite import NonFiniteReport, not_finite, sum_of, sum_of_squares
from thinpipe.train.engines.loss import Loss, count_labelled
from thinpipe.train.engines.plan import Holding, counts
from thinpipe.train.engines.units import Units, cut_model
from thinpipe.train.engines.world import World
from thinpipe.train.tasks.task import Batch


class DriftError(RuntimeError):
    """Replicas that should be identical differ."""


def replicate(
    module: nn.Module,
    world: World,
    compress: str | None,
    *,
    error_feedback: bool = True,
    seed: int = 0,
    **torch_options: Any,
) -> tuple[DistributedDataParallel, DDPState | None]:
    """Wrap a module in DDP, which averages gradients over workers: with torch's all-reduce, or a codec's hook."""
    replica = DistributedDataParallel(
        module,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.group,
        **torch_options,
    )
    if compress is None:
        return replica, None
    state = ddp_state(compress, process_group=world.group, error_feedback=error_feedback, seed=seed)
    replica.register_comm_hook(state, ddp_hook)
    return replica, state


class ReplicaEngine(Engine):
    """The model as one stage; its share of a batch may be computed in chunks, whose gradients add up."""

    stage_count = 1
    reads_inputs = reads_labels = True

    def __init__(
        self,
        model: nn.Module | Units,
        world: World,
        *,
        chunks: int = 1,
        compress: str = "none",  # codec of gradients
        error_feedback: bool = True,
        seed: int = 0,  # of codecs that round at random
        amp: bool = False,
        make_loss: Callable[..., Loss] = Loss,
    ) -> None:
        super().__init__(world)
        self._chunks, self._amp = chunks, amp
        self._model = cut = model if isinstance(model, Units) else cut_model(model, ())
        (module,) = cut_units(cut.units, ())
        cut.load_own([module], world.device)
        self.stages = {0: NamedModule.of(module, cut.model)}
        self._module = world.to_device(module)
        if cut.outputs is not None:
            cut.buffers_to(world.device)
        self._statistics = DeferredStatistics(module)
        self.shares = (world.worker, world.workers)
        self.owns_state = world.is_client
        self.client_has_outcome = world.workers == 1
        held: dict[str, Any] = {
            "first_unit": 0,
            "units": len(cut.names),
            "unit_names": cut.names,
            **counts(module.parameters()),
        }
        self.holdings = tuple(Holding(stage=0, worker=worker, **held) for worker in range(world.workers))
        self._side_input_names = module.asks
        self.loss = make_loss(cut.tail, device=world.device, amp=amp)
        self._hook: DDPState | None = None
        self._replica: nn.Module = module
        if world.workers > 1:
            spec = None if compress == "none" else compress
            self._replica, self._hook = replicate(module, world, spec, error_feedback=error_feedback, seed=seed)
        self._steps = 0
        self._outputs: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}

    def warm_up(self) -> None:
        if self._hook is not None:
            largest = max((each for each in self._module.parameters() if each.requires_grad), key=torch.numel)
            as_matrix = (largest.shape[0], largest.numel() // largest.shape[0])
            warm_codec(self._hook.codec, as_matrix, largest.dtype, self.world.device)

    def compute(self, *batches: Batch | None) -> tuple[float, float]:
        given = [batch for batch in batches if batch is not None]
        assert len(given) == len(batches), "every replica has data"
        labels = torch.cat([batch.labels for batch in given])
        labelled = count_labelled(labels)
        if labels.dim() > 1:  # texts: the number of labelled positions may differ between replicas
            labelled = int(self.world.control.sum(torch.tensor([labelled])))
        else:
            labelled *= self.world.workers
        self.loss.begin(labels, self._chunks * len(given), labelled, self.world.workers)
        with waiting():  # inside torch's collectives
            self._backward(self._replica, given)
        self._steps += 1
        return float(torch.stack(list(self._losses.values())).mean()) / self.world.workers, self.loss.correct()

    def compute_alone(self, batch: Batch) -> None:
        """Run forward and backward without the other replicas, to measure the time; leave no gradients."""
        self.loss.begin(batch.labels, self._chunks)
        self._backward(self._module, [batch])
        self._module.zero_grad()

    def _backward(self, module: nn.Module, batches: Sequence[Batch]) -> None:
        """Run forward and backward of all chunks of all batches, and add up the gradients."""
        last = self._chunks * len(batches) - 1
        for number, batch in enumerate(batches):
            inputs, labels = to_device(batch.inputs, self.world.device), batch.labels.to(self.world.device)
            pieces = zip(*(tensor.chunk(self._chunks) for tensor in (*inputs, labels)), strict=True)
            for chunk, (*values, target) in enumerate(pieces, number * self._chunks):
                # Replicas exchange gradients after the last chunk.
                stay = isinstance(module, DistributedDataParallel) and chunk < last
                with module.no_sync() if stay else nullcontext():  # type: ignore[operator]
                    outputs = self._run(module, values)
                    loss = self.loss(outputs, target)
                    (loss / (last + 1)).backward()
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                self._outputs[chunk], self._losses[chunk] = sum_of(outputs), loss.detach()
            self._statistics.commit()

    def _run(self, module: nn.Module, inputs: Any) -> Tensor | tuple[Tensor, ...]:
        with torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=self._amp):
            outputs: Tensor | tuple[Tensor, ...] = module(
                *inputs, **self._model.side_inputs(self._side_input_names, inputs)
            )
            return outputs

    def predict(self, inputs: tuple[Tensor, ...] | None) -> Tensor | tuple[Tensor, ...] | None:
        assert inputs is not None
        with torch.no_grad():
            return self._run(self._module, to_device(inputs, self.world.device))

    def non_finite_reports(self) -> list[NonFiniteReport]:
        return [
            NonFiniteReport(
                stage=0,
                worker=self.world.worker,
                outputs=not_finite(self._outputs),
                losses=not_finite(self._losses),
                input_gradients=[],
                gradients=not math.isfinite(sum_of_squares(self._module.parameters())),
            )
        ]

    def sent_bytes(self) -> int:
        """Return the bytes sent, by the ring all-reduce of Gloo and NCCL: 2 (n - 1) / n of all gradients per replica.

        Compressed messages are gathered instead: each is sent to all other replicas.
        """
        replicas = self.world.workers
        if self._hook is not None:
            return self._hook.wire_bytes * (replicas - 1)
        gradients = sum(p.numel() * p.element_size() for p in self.parameters() if p.requires_grad)
        return self._steps * 2 * gradients * (replicas - 1) // replicas

    def codec_state(self) -> dict[str, Tensor]:
        if self._hook is None:
            return {}
        saved = self._hook.state_dict(self._module)
        state = {f"replica/{self.world.worker}/steps": torch.tensor(saved["steps"])}
        for name, kept in saved["parameters"].items():
            if kept["error"] is not None:
                state[f"replica/{self.world.worker}/{name}/error"] = kept["error"]
            for key, value in kept["codec"].items():
                state[f"replica/{self.world.worker}/{name}/codec/{key}"] = value
        return state

    def load_codec_state(self, saved: dict[str, Tensor]) -> None:
        if self._hook is None or not saved:  # no state: saved with another number of replicas
            return
        saved = dict(saved)
        steps = int(saved.pop(f"replica/{self.world.worker}/steps"))
        parameters: dict[str, dict[str, Any]] = {}
        for path, value in saved.items():
            _, _, name, kind, *key = path.split("/", 4)
            kept = parameters.setdefault(name, {"error": None, "codec": {}})
            if kind == "error":
                kept["error"] = value
            else:
                kept["codec"][key[0]] = value
        hook = {"spec": self._hook.codec.spec, "rank": self._hook.rank, "replicas": self._hook.replicas}
        self._hook.load_state_dict({**hook, "steps": steps, "parameters": parameters}, self._module)

    def check_replicas(self, step: int) -> None:
        hashes = self.world.gather(_hash(self._module.parameters()))
        apart = [str(worker) for worker, each in enumerate(hashes) if each != hashes[0]]
        if apart:
            raise DriftError(
                f"replicas have drifted apart: after step {step} the parameters of worker {', '.join(apart)} are not "
                "those of worker 0. Gradients were changed in transit, or memory is faulty; go on from a checkpoint"
            )


def _hash(parameters: Iterable[nn.Parameter]) -> str:
    digest = xxhash.xxh3_128()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
