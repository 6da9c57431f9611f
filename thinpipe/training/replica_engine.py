"""A whole model on this worker: alone, or one of several replicas whose gradients are averaged (DDP)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinpipe.ddp import DDPState, ddp_hook, ddp_state
from thinpipe.pipeline.batchnorm import DeferredStatistics
from thinpipe.pipeline.partition import cut_units
from thinpipe.pipeline.report import LinkReport
from thinpipe.pipeline.units import unit_names, units_of
from thinpipe.pipeline.warm import warm_codec
from thinpipe.training.checked_stage import not_finite, sum_of
from thinpipe.training.clip import sum_of_squares
from thinpipe.training.engine import Engine, NamedModule, count_correct, loss_of, to_device
from thinpipe.training.events import Holding, LinkPlan
from thinpipe.training.nan import Suspicion
from thinpipe.training.place import Place
from thinpipe.training.settings import Settings
from thinpipe.workers.activity import waiting
from thinpipe.workloads.task import Batch


class DriftError(RuntimeError):
    """Replicas that should be the same are not."""


class ReplicaEngine(Engine):
    """The model as one stage; its batch, or its share of it, may be taken in chunks whose gradients add up."""

    reads_inputs = reads_labels = True

    def __init__(self, model: nn.Module, settings: Settings, place: Place) -> None:
        self.place, self._settings = place, settings
        units = units_of(model)
        (module,) = cut_units(units, ())
        self.stages = {0: NamedModule.of(module, model)}
        self._module = place.hold(module)
        self._statistics = DeferredStatistics(module)
        self.shares = (place.worker, place.workers)
        self.owns_state = place.is_client
        self.client_has_outcome = place.workers == 1
        self._unit_names = unit_names(model, units)
        self._hook: DDPState | None = None
        self._replica: nn.Module = module
        if place.workers > 1:
            self._replica = DistributedDataParallel(
                module,
                device_ids=[place.device] if place.device.type == "cuda" else None,
                process_group=place.group,
            )
            if settings.compress_backward != "none":
                self._hook = ddp_state(settings.compress_backward, process_group=place.group, seed=settings.seed)
                self._replica.register_comm_hook(self._hook, ddp_hook)
        self._steps = 0
        self._outputs: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}

    def warm_up(self) -> None:
        if self._hook is not None:
            largest = max(self._module.parameters(), key=torch.numel)
            as_matrix = (largest.shape[0], largest.numel() // largest.shape[0])
            warm_codec(self._hook.codec, as_matrix, largest.dtype, self.place.device)

    def train_step(self, batch: Batch | None) -> tuple[float, int]:
        assert batch is not None
        inputs, labels = to_device(batch.inputs, self.place.device), batch.labels.to(self.place.device)
        with waiting():  # in places that only torch knows
            return self._train_step(inputs, labels)

    def _train_step(self, inputs: tuple[Tensor, ...], labels: Tensor) -> tuple[float, int]:
        chunks, correct = self._settings.chunks, 0
        pieces = zip(*(tensor.chunk(chunks) for tensor in (*inputs, labels)), strict=True)
        for chunk, (*values, target) in enumerate(pieces):
            with self._gradients_stay_here() if chunk < chunks - 1 else nullcontext():
                logits = self._run(self._replica, values)
                loss = loss_of(logits, target)
                (loss / chunks).backward()
            correct += count_correct(logits, target)
            self._outputs[chunk], self._losses[chunk] = sum_of([logits]), loss.detach()
        self._statistics.commit()
        self._steps += 1
        return float(torch.stack(list(self._losses.values())).mean()) / self.place.workers, correct

    def _gradients_stay_here(self) -> Any:
        """Replicas exchange gradients after the last chunk."""
        return self._replica.no_sync() if isinstance(self._replica, DistributedDataParallel) else nullcontext()

    def _run(self, module: nn.Module, inputs: Any) -> Tensor:
        with torch.autocast(self.place.device.type, dtype=torch.bfloat16, enabled=self._settings.amp):
            return module(*inputs)

    def tell_samples(self, samples: Tensor) -> None:
        """Replicas keep nothing of a sample."""

    def predict(self, inputs: tuple[Tensor, ...] | None) -> Tensor | None:
        assert inputs is not None
        with torch.no_grad():
            return self._run(self._module, to_device(inputs, self.place.device))

    def takes(self, evaluation_batch: int) -> bool:
        return evaluation_batch % self.place.workers == self.place.worker

    def suspicions(self) -> list[Suspicion]:
        suspicion = Suspicion(
            stage=0,
            worker=self.place.worker,
            outputs=not_finite(self._outputs),
            losses=not_finite(self._losses),
            input_gradients=[],
            gradients=not torch.tensor(sum_of_squares(self._module.parameters())).isfinite().item(),
        )
        return [suspicion]

    def sent_bytes(self) -> int:
        """Gloo and NCCL sum in a ring, where each replica sends all gradients twice less its own parts of them.

        Compressed messages are gathered instead: each reaches all other replicas.
        """
        replicas = self.place.workers
        if self._hook is not None:
            return self._hook.wire_bytes * (replicas - 1)
        gradients = sum(p.numel() * p.element_size() for p in self._module.parameters() if p.requires_grad)
        return self._steps * 2 * gradients * (replicas - 1) // replicas

    def collect_links(self) -> tuple[list[LinkReport], float]:
        return [], 0.0

    def memory(self) -> dict[str, Tensor]:
        if self._hook is None:
            return {}
        saved = self._hook.state_dict(self._module)
        state = {f"replica/{self.place.worker}/steps": torch.tensor(saved["steps"])}
        for name, kept in saved["parameters"].items():
            if kept["error"] is not None:
                state[f"replica/{self.place.worker}/{name}/error"] = kept["error"]
            for key, value in kept["codec"].items():
                state[f"replica/{self.place.worker}/{name}/codec/{key}"] = value
        return state

    def recall(self, memory: dict[str, Tensor]) -> None:
        if self._hook is None or not memory:  # nothing was kept: saved with another number of replicas
            return
        memory = dict(memory)
        steps = int(memory.pop(f"replica/{self.place.worker}/steps"))
        parameters: dict[str, dict[str, Any]] = {}
        for path, value in memory.items():
            _, _, name, kind, *key = path.split("/", 4)
            kept = parameters.setdefault(name, {"error": None, "codec": {}})
            if kind == "error":
                kept["error"] = value
            else:
                kept["codec"][key[0]] = value
        saved = {
            "spec": self._hook.codec.spec,
            "rank": self._hook.rank,
            "replicas": self._hook.replicas,
            "steps": steps,
            "parameters": parameters,
        }
        self._hook.load_state_dict(saved, self._module)

    def check_replicas(self, step: int) -> None:
        hashes = self.place.gather(_hash(self._module.parameters()))
        apart = [str(worker) for worker, each in enumerate(hashes) if each != hashes[0]]
        if apart:
            raise DriftError(
                f"replicas have drifted apart: after step {step} the parameters of worker {', '.join(apart)} are not "
                "those of worker 0. Gradients were changed on their way, or memory is faulty; go on from a checkpoint"
            )

    def holdings(self) -> tuple[Holding, ...]:
        parameters = sum(parameter.numel() for parameter in self._module.parameters())
        return tuple(
            Holding(
                stage=0,
                worker=worker,
                first_unit=0,
                units=len(self._unit_names),
                unit_names=self._unit_names,
                parameters=parameters,
            )
            for worker in range(self.place.workers)
        )

    def link_plans(self) -> tuple[LinkPlan, ...]:
        return ()


def _hash(parameters: Iterable[nn.Parameter]) -> str:
    digest = xxhash.xxh3_128()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
