"""Predictions: step time, traffic and memory of one way to train a model on a cluster.

Times of units, codecs, messages and updates come from the profile and the cluster; ``train.engines.simulator`` combines
them in the order of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from thinpipe.codecs.recipes import recipe_of
from thinpipe.lab.plan.cluster import Cluster, Machine
from thinpipe.lab.plan.profile import ModelProfile, at, stage_units, tensor_bytes, wire_bytes
from thinpipe.pipeline.order import Action, Order, in_flight, make_order
from thinpipe.pipeline.partition import Layout
from thinpipe.train.engines.plan import peak_activation_bytes
from thinpipe.train.engines.simulator import ActionCost, Hop, Key, LinkCost, Simulated, StepEnd, simulate

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # of DistributedDataParallel
_DELAYS_OF_A_HOP = 2  # gloo's collectives send once the receiver has announced its receive
_OTHER_DELAYS = 4  # of a step of replicas: the number of labels, a broadcast of buffers, the statistics
# Speed of codecs that were not measured, in GB/s of floats to encode and to decode: benchmarks/codec_speed, two cores.
_CODEC_GB_PER_S = {"tile": (18.3, 15.0), "coded": (1.46, 2.07), "gauss": (3.4, 4.2), "axes": (1.5, 2.0)}
_OTHER_GB_PER_S = (2.3, 8.0)
_GPU_FACTOR = 50.0  # the same record, H200
_UPDATE_GB_PER_S = {"cpu": 10.0, "cuda": 1000.0}
_STEPS = 4  # simulated; the last one is taken, when workers begin as in the steady state


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train: what `thinpipe train` needs to run it, and the machines by rank."""

    parallel: Literal["none", "data", "pipeline"]
    machines: tuple[int, ...]  # of the cluster
    chunks: int = 1
    layout: Layout | None = None  # this and the following: of a pipeline
    cuts: tuple[int, ...] = ()
    schedule: Order | None = None
    forward: str = "none"
    backward: str = "none"
    recompute: bool = False

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def placement(self) -> list[int]:
        """The rank that has each stage."""
        return [stage % len(self.machines) for stage in range(self.stages)]

    @property
    def compress(self) -> str:
        """The codecs as an option of `thinpipe train`: a preset, or those of both directions."""
        preset = recipe_of(self.forward, self.backward)
        return preset or (self.forward if self.forward == self.backward else f"{self.forward}/{self.backward}")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted step of a candidate."""

    candidate: Candidate
    step_ms: float
    memory_bytes: tuple[int, ...]  # by worker
    wire_bytes: int = 0  # of a step, over all links
    bottleneck: str = ""  # the worker or the queue that is busy longest
    busy: float = 1.0  # its share of the step
    details: Any = field(default=None, compare=False, repr=False)  # the simulation, if it was recorded


class Predictor:
    """Predicts steps of a batch of one model on one cluster."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, batch_size: int) -> None:
        self.profile, self.cluster, self.batch_size = profile, cluster, batch_size
        self.wire_bytes = lru_cache(maxsize=None)(self._wire_bytes)
        self.unit_ms = lru_cache(maxsize=None)(self._unit_ms)
        self.codec_ms = lru_cache(maxsize=None)(self._codec_ms)

    def predict(self, candidate: Candidate, *, record: bool = False) -> Prediction:
        if candidate.parallel == "pipeline":
            return self._pipeline(candidate, record)
        return self._replicas(candidate)

    # Parts

    def _unit_ms(self, unit: int, samples: float, number: int, kind: str) -> float:
        """Return the time of a unit's forward or backward of a microbatch on a machine of the cluster."""
        profile, machine = self.profile.units[unit], self.cluster.machines[number]
        points = profile.forward_ms if kind == "F" else profile.backward_ms
        if machine.tflops is None:
            return at(points, samples) if points else 0.0
        flops = profile.flops if kind == "F" else profile.backward_flops
        return flops * samples / (machine.tflops * 1e9)

    def action_ms(self, machine: Machine, workers: int = 1) -> float:
        """Return the time of an action apart from its module, in a pipeline of this number of workers."""
        if machine.tflops is not None or self.profile.action_ms is None:
            return machine.action_ms
        crowded = self.profile.crowded_action_ms
        return self.profile.action_ms + (crowded[min(workers, len(crowded)) - 1] if crowded else 0.0)

    def _wire_bytes(self, cut: int, spec: str, direction: str, samples: int, chunks: int) -> int:
        tensors = self.profile.crossing(cut)
        if direction == "backward":
            tensors = tuple(each for each in tensors if each.has_gradient)
        return wire_bytes(spec, tensors, samples, chunks) if tensors else 0

    def _codec_ms(self, cut: int, spec: str, direction: str, samples: int, machine: Machine) -> tuple[float, float]:
        """Return the times to encode and to decode a microbatch's tensors at a cut."""
        tensors = self.profile.crossing(cut)
        if direction == "backward":
            tensors = tuple(each for each in tensors if each.has_gradient)
        size = tensor_bytes(tensors, samples)
        measured = self.profile.codecs.get(spec)
        if machine.tflops is None and measured:
            return at(measured["encode"], size), at(measured["decode"], size)
        if spec == "none" or not size:
            return 0.0, 0.0
        family = "coded" if "coded" in spec else spec.partition(":")[0]
        factor = _GPU_FACTOR if machine.device == "cuda" else 1.0
        speeds = _CODEC_GB_PER_S.get(family, _OTHER_GB_PER_S)
        encode, decode = (size / (speed * factor * 1e6) for speed in speeds)
        return encode, decode

    def update_ms(self, machine: Machine, trained: int) -> float:
        profile = self.profile
        if machine.tflops is None and profile.update_ms is not None:
            return profile.update_ms * trained / max(sum(unit.trained for unit in profile.units), 1)
        moved = trained * (3 * profile.element_bytes + 2 * profile.optimizer_bytes)
        return moved / (_UPDATE_GB_PER_S[machine.device] * 1e6)

    # A pipeline

    def costs(self, candidate: Candidate) -> dict[Key, ActionCost]:
        """Return the cost of every action of a pipeline."""
        samples = self.batch_size // candidate.chunks
        found: dict[Key, ActionCost] = {}
        bounds = stage_units(candidate.cuts, len(self.profile.units))
        for stage, (first, end) in enumerate(bounds):
            number = candidate.machines[candidate.placement[stage]]
            machine = self.cluster.machines[number]
            action_ms = self.action_ms(machine, len(candidate.machines))

            def codec(cut: int, direction: str, which: int, machine: Machine = machine) -> float:
                spec = candidate.forward if direction == "forward" else candidate.backward
                return self.codec_ms(cut, spec, direction, samples, machine)[which]

            is_first, is_last = stage == 0, stage == len(bounds) - 1
            times = {
                kind: sum(self.unit_ms(unit, samples, number, kind) for unit in range(first, end)) for kind in "FB"
            }
            if candidate.recompute and times["B"]:
                times["B"] += times["F"]
            found[stage, "F"] = ActionCost(
                times["F"] + action_ms,
                0.0 if is_first else codec(first, "forward", 1),
                0.0 if is_last else codec(end, "forward", 0),
            )
            found[stage, "B"] = ActionCost(
                times["B"] + (action_ms if times["B"] else 0.0),
                0.0 if is_last else codec(end, "backward", 1),
                0.0 if is_first else codec(first, "backward", 0),
            )
        return found

    def links(self, candidate: Candidate) -> dict[Hop, LinkCost]:
        """Return the cost of a microbatch on every link of a pipeline."""
        samples, found = self.batch_size // candidate.chunks, {}
        for stage, cut in enumerate(candidate.cuts):
            here, there = (candidate.machines[candidate.placement[each]] for each in (stage, stage + 1))
            for source, target, spec, direction in (
                (stage, stage + 1, candidate.forward, "forward"),
                (stage + 1, stage, candidate.backward, "backward"),
            ):
                size = self.wire_bytes(cut, spec, direction, samples, candidate.chunks)
                ends = (here, there) if direction == "forward" else (there, here)
                if size:
                    found[source, target] = self.cluster.path(*ends).cost(size)
        return found

    def _end(self, candidate: Candidate) -> StepEnd:
        machines = [self.cluster.machines[number] for number in candidate.machines]
        trained = [0] * len(machines)
        for stage, (first, end) in enumerate(stage_units(candidate.cuts, len(self.profile.units))):
            trained[candidate.placement[stage]] += sum(unit.trained for unit in self.profile.units[first:end])
        return StepEnd(
            delay_ms=self.cluster.delays_ms(candidate.machines),
            before_ms=[self.profile.step_ms] * len(machines),
            update_ms=[self.update_ms(machine, count) for machine, count in zip(machines, trained, strict=True)],
        )

    def _pipeline(self, candidate: Candidate, record: bool) -> Prediction:
        assert candidate.schedule is not None
        orders = make_order(candidate.schedule, candidate.placement, candidate.chunks)
        links = self.links(candidate)
        end, slowdown = self._end(candidate), self.cluster.slowdown
        done = simulate(orders, self.costs(candidate), links, end=end, steps=_STEPS, slowdown=slowdown, record=record)
        name, busy = self._bottleneck(candidate, done)
        return Prediction(
            candidate=candidate,
            step_ms=done.step_ms,
            memory_bytes=self.memory(candidate, orders),
            wire_bytes=candidate.chunks * sum(link.wire_bytes for link in links.values()),
            bottleneck=name,
            busy=busy,
            details=done if record else None,
        )

    def _bottleneck(self, candidate: Candidate, done: Simulated) -> tuple[str, float]:
        """Return the worker or the queue that is busy for most of a step, and its share of the step."""
        workers = [self.cluster.machines[number].name for number in candidate.machines]
        busy = dict(zip(workers, done.busy_ms, strict=True))
        busy |= {f"link {queue.name}": ms for queue, ms in done.queue_ms.items()}
        name = max(busy, key=lambda each: busy[each])
        return name, busy[name] / (_STEPS * done.step_ms)

    # Replicas and one process

    def _replicas(self, candidate: Candidate) -> Prediction:
        """Return the prediction of DistributedDataParallel, or of one process."""
        count, units = len(candidate.machines), range(len(self.profile.units))
        samples, chunks = self.batch_size // (count * candidate.chunks), candidate.chunks
        trained = sum(unit.trained for unit in self.profile.units)
        slowest = backward_ms = 0.0
        for number in candidate.machines:
            machine = self.cluster.machines[number]
            forward, backward = (sum(self.unit_ms(unit, samples, number, kind) for unit in units) for kind in "FB")
            if machine.tflops is None and self.profile.replica_ms:
                scale = at(self.profile.replica_ms, samples) / max(forward + backward, 1e-9)
                forward, backward = forward * scale, backward * scale
            else:
                forward, backward = (each + self.action_ms(machine) for each in (forward, backward))
            update = self.update_ms(machine, trained)
            took = (chunks - 1) * (forward + backward) + update
            if took + forward + backward > slowest:
                slowest, backward_ms = took + forward + backward, backward
        shared = [1.0, *self.cluster.slowdown][min(count, len(self.cluster.slowdown))]
        slowest, backward_ms = slowest * shared, backward_ms * shared
        step_ms, size, name, busy = slowest, 0, self.cluster.machines[candidate.machines[0]].name, 1.0
        if count > 1:
            gradient_bytes = trained * self.profile.element_bytes
            size = 2 * (count - 1) * gradient_bytes // count
            comm_ms, exposed_ms = self._exchange(candidate.machines, gradient_bytes, backward_ms)
            step_ms += exposed_ms
            if comm_ms > slowest:
                name, busy = "the exchange of gradients", comm_ms / step_ms
        return Prediction(
            candidate=candidate,
            step_ms=step_ms,
            memory_bytes=tuple(self._replica_bytes(samples) for _ in candidate.machines),
            wire_bytes=size * count,
            bottleneck=name,
            busy=busy,
        )

    def _exchange(self, machines: Sequence[int], gradient_bytes: int, backward_ms: float) -> tuple[float, float]:
        """Return the times of the ring all-reduces of all gradients, and how much of them backward does not hide."""
        hops = 2 * (len(machines) - 1)
        ring = [self.cluster.path(*pair) for pair in pairwise((*machines, machines[0]))]
        delay_ms = max(path.delay_ms for path in ring)

        def wire_ms(size: int) -> float:
            return max(path.wire_ms(hops * size / len(machines)) for path in ring)

        # The last bucket is complete at the end of backward; all-reduces of several buckets share their delays.
        last = (gradient_bytes - _FIRST_BUCKET_BYTES) % _BUCKET_BYTES or _BUCKET_BYTES
        last = min(last, gradient_bytes)
        hidden = min(wire_ms(gradient_bytes - last), backward_ms)
        total = wire_ms(gradient_bytes) + (hops * _DELAYS_OF_A_HOP + _OTHER_DELAYS) * delay_ms
        return total, total - hidden

    # Memory

    def state_bytes(self, first: int, end: int) -> int:
        """Return the bytes of weights, gradients and optimizer state of units."""
        units, size = self.profile.units[first:end], self.profile.element_bytes
        return sum(unit.parameters * size + unit.trained * (size + self.profile.optimizer_bytes) for unit in units)

    def _replica_bytes(self, samples: int) -> int:
        kept = sum(unit.kept_bytes for unit in self.profile.units) * samples
        return self.state_bytes(0, len(self.profile.units)) + round(kept) + self._temporary(0, None, samples)

    def _temporary(self, first: int, end: int | None, samples: int) -> int:
        """Return the bytes of gradients in backward: those of the largest tensor and of what it was computed from."""
        return round(2 * samples * max(unit.largest_bytes for unit in self.profile.units[first:end]))

    def memory(self, candidate: Candidate, orders: dict[int, list[Action]]) -> tuple[int, ...]:
        """Return the bytes of every worker: state, microbatches in flight, and buffers of links."""
        samples, chunks = self.batch_size // candidate.chunks, candidate.chunks
        bounds = stage_units(candidate.cuts, len(self.profile.units))
        window = min(in_flight(candidate.schedule or "gpipe", candidate.stages, chunks), chunks)
        per_chunk, fixed, extra = {}, [0.0] * len(candidate.machines), [0.0] * len(candidate.machines)
        for stage, (first, end) in enumerate(bounds):
            rank = candidate.placement[stage]
            kept = sum(unit.kept_bytes for unit in self.profile.units[first:end]) * samples
            received = tensor_bytes(self.profile.crossing(first), samples) if stage else 0
            sent = tensor_bytes(self.profile.crossing(end), samples) if end < len(self.profile.units) else 0
            per_chunk[stage] = received + (sent if candidate.recompute else round(kept))
            again = kept if candidate.recompute else 0
            extra[rank] = max(extra[rank], again + self._temporary(first, end, samples))
            fixed[rank] += self.state_bytes(first, end)
            for cut, direction, spec in (
                (first, "forward", candidate.forward),
                (end, "backward", candidate.backward),
            ):
                if 0 < cut < len(self.profile.units):  # receives of all chunks are posted at the start of a step
                    fixed[rank] += chunks * self.wire_bytes(cut, spec, direction, samples, chunks)
            if end < len(self.profile.units):
                fixed[rank] += window * self.wire_bytes(end, candidate.forward, "forward", samples, chunks)
        return tuple(
            round(fixed[rank] + extra[rank]) + peak_activation_bytes({rank: orders[rank]}, per_chunk)
            for rank in range(len(candidate.machines))
        )

    def with_cluster(self, cluster: Cluster) -> Predictor:
        return Predictor(self.profile, cluster, self.batch_size)

    def limited(self, prediction: Prediction, limit: int | None) -> str | None:
        """Return why a prediction does not fit into memory; None if it fits."""
        for rank, (number, needed) in enumerate(
            zip(prediction.candidate.machines, prediction.memory_bytes, strict=True)
        ):
            most = [each for each in (self.cluster.machines[number].memory_bytes, limit) if each is not None]
            if most and needed > min(most):
                return f"worker {rank} ({self.cluster.machines[number].name})"
        return None


def faster(cluster: Cluster, factor: float) -> Cluster:
    """Return a cluster whose stated machines are faster."""
    machines = tuple(replace(each, tflops=each.tflops and each.tflops * factor) for each in cluster.machines)
    return replace(cluster, machines=machines)


def samples_per_chunk(batch_size: int) -> Sequence[int]:
    """Return the numbers of microbatches that divide a batch, up to 64."""
    return [count for count in range(1, min(batch_size, 64) + 1) if batch_size % count == 0]
