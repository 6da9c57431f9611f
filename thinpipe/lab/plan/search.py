"""The search for the best candidate under limits.

(1)  chains of machines: every order of a few, nearest neighbours of many; from the client on
(2)  for each chain, layout, codec and number of microbatches: cuts that balance workers and links, by dynamic
     programming, and an estimate: the busiest worker or link, and the way of one microbatch
(3)  the most promising are simulated, under every schedule, with and without recomputation
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

import numpy as np

from thinpipe.codecs.recipes import directions
from thinpipe.lab.plan.cluster import Cluster
from thinpipe.lab.plan.cuts import Times, client_server_cuts, linear_cuts, stage_times
from thinpipe.lab.plan.predictor import Candidate, Prediction, Predictor, samples_per_chunk
from thinpipe.options import OptionError
from thinpipe.pipeline.partition import Layout, stage_count
from thinpipe.system.sizes import size_text

# Loss in nats that a preset adds to a language model's validation loss: the largest of the committed records,
# benchmarks/language_model, for its models and text (docs/few-bits.md).
NATS = {"none": 0.0, "8bit": 0.0012, "4bit": 0.0027, "3bit": 0.0028, "2bit": 0.0147, "1bit": 0.0413}
_FEW_MACHINES = 6  # of which every order is tried
_CHAIN_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SIMULATED = 36  # most promising candidates
_PER_SHAPE = 3  # of one chain and layout
_AS_GOOD = 1.01  # times the least time


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a search."""

    compress: tuple[str, ...] = tuple(NATS)  # presets or specs
    nats: float | None = None  # that the codecs may add; None: any
    memory_bytes: int | None = None  # of each worker, in addition to the machines' own
    layouts: tuple[Layout, ...] = ("client-server", "linear")
    client_layers: tuple[int, int] | None = None  # at least these stay on the client
    schedules: tuple[str, ...] = ("gpipe", "1f1b")
    chunks: tuple[int, ...] | None = None
    parallel: tuple[str, ...] = ("none", "data", "pipeline")
    max_workers: int | None = None

    def codecs(self) -> list[str]:
        """Return the codecs within the accuracy budget."""
        if self.nats is None:
            return list(self.compress)
        within = [spec for spec in self.compress if NATS.get(spec, math.inf) <= self.nats]
        if not within:
            known = ", ".join(f"{spec} {nats:g}" for spec, nats in NATS.items() if spec in self.compress)
            raise OptionError(f"no codec adds {self.nats:g} nats or less: {known or 'none of them has been measured'}")
        return within


def search(predictor: Predictor, limits: Limits) -> list[Prediction]:
    """Return predictions of the best candidates, the fastest first; raise OptionError if none fits."""
    found = [*_alone(predictor, limits), *_pipelines(predictor, limits)]
    fitting = [each for each in found if predictor.limited(each, limits.memory_bytes) is None]
    if not fitting:
        raise OptionError(_why_nothing_fits(predictor, limits, found))
    least_ms = min(each.step_ms for each in fitting)

    def preference(each: Prediction) -> tuple[float, ...]:
        """Sort by time; of those as good as the fastest, those with more bits, fewer workers and less memory."""
        made, is_best = each.candidate, each.step_ms <= _AS_GOOD * least_ms
        ties = (_nats(made), len(made.machines), max(each.memory_bytes)) if is_best else ()
        return (0.0 if is_best else each.step_ms, *ties, each.step_ms)

    return sorted(fitting, key=preference)


def _nats(candidate: Candidate) -> float:
    return NATS.get(candidate.compress, max(NATS.values()))


def _alone(predictor: Predictor, limits: Limits) -> Iterator[Prediction]:
    """Yield one process on the client, and replicas, with the number of microbatches that is fastest and fits."""
    chains: list[tuple[int, ...]] = [(0,)] if "none" in limits.parallel else []
    if "data" in limits.parallel:
        chains += _chains(predictor.cluster, limits)
    batch = predictor.batch_size
    for chain in chains:
        parts = [count for count in samples_per_chunk(batch) if batch % (count * len(chain)) == 0]
        tried = [
            predictor.predict(Candidate(parallel="data" if len(chain) > 1 else "none", machines=chain, chunks=count))
            for count in (limits.chunks or parts)
            if count in parts
        ]
        fits = [each for each in tried if predictor.limited(each, limits.memory_bytes) is None] or tried[-1:]
        if fits:
            yield min(fits, key=lambda each: each.step_ms)


def _pipelines(predictor: Predictor, limits: Limits) -> list[Prediction]:
    if "pipeline" not in limits.parallel:
        return []
    estimated: list[tuple[float, Candidate]] = []
    codecs = [directions(spec) for spec in limits.codecs()]
    batch = predictor.batch_size
    chunks = [count for count in limits.chunks or samples_per_chunk(batch) if batch % count == 0]
    for chain in _chains(predictor.cluster, limits):
        for layout in limits.layouts:
            if layout == "linear" and (limits.client_layers is not None or predictor.profile.is_tied):
                continue
            if stage_count(len(chain), layout) > len(predictor.profile.units):
                continue
            shape = [
                (estimate(predictor, each), each)
                for spec in codecs
                for count in chunks
                if (each := _cut(predictor, limits, chain, layout, count, spec)) is not None
            ]
            estimated += sorted(shape, key=lambda pair: pair[0])[: _PER_SHAPE if len(chain) > 3 else 2 * _PER_SHAPE]
    estimated.sort(key=lambda pair: pair[0])
    # At least the best of every number of workers and layout.
    groups: dict[tuple[int, str | None], int] = {}
    chosen: list[Candidate] = []
    for _, each in estimated:
        key = len(each.machines), each.layout
        groups[key] = groups.get(key, 0) + 1
        if len(chosen) < _SIMULATED or groups[key] <= 1:
            chosen.append(each)
    return [prediction for each in chosen for prediction in _simulated(predictor, limits, each)]


def _simulated(predictor: Predictor, limits: Limits, candidate: Candidate) -> Iterator[Prediction]:
    """Yield the candidate under every schedule, recomputing only if it does not fit otherwise."""
    for schedule in limits.schedules:
        orders = [schedule]
        if schedule == "1f1b":
            most = candidate.chunks
            counts = {candidate.stages, *(candidate.stages * factor // 2 for factor in (3, 4, 6)), most}
            orders = [f"1f1b:{count}" for count in sorted(counts) if count <= max(most, candidate.stages)]
        for order in orders:
            plain = predictor.predict(replace(candidate, schedule=order))
            if predictor.limited(plain, limits.memory_bytes) is None:
                yield plain
            else:
                yield predictor.predict(replace(candidate, schedule=order, recompute=True))


def estimate(predictor: Predictor, candidate: Candidate) -> float:
    """Return an estimate of the step: the busiest worker or queue, and the way of a microbatch there and back."""
    costs, links = predictor.costs(candidate), predictor.links(candidate)
    workers = [0.0] * len(candidate.machines)
    way = 0.0
    for (stage, _), cost in costs.items():
        workers[candidate.placement[stage]] += sum(cost)
        way += sum(cost)
    queues: dict[str, float] = {}
    for link in links.values():
        way += link.delay_ms
        for queue in link.queues:
            wire_ms = queue.wire_ms(link.wire_bytes)
            queues[queue.name] = queues.get(queue.name, 0.0) + wire_ms
            way += wire_ms
    return max([*workers, *queues.values()]) * (candidate.chunks - 1) + way


# (1) chains


def _chains(cluster: Cluster, limits: Limits) -> Iterator[tuple[int, ...]]:
    """Yield chains of two machines or more, from the client on; each kind of machine in every place once."""
    count = min(len(cluster.machines), limits.max_workers or len(cluster.machines))
    others = list(range(1, len(cluster.machines)))
    if len(cluster.machines) <= _FEW_MACHINES:
        seen = set()
        for length in range(1, count):
            for rest in permutations(others, length):
                kinds = tuple(cluster.machines[each].kind or cluster.machines[each].name for each in rest)
                if kinds not in seen:
                    seen.add(kinds)
                    yield (0, *rest)
        return
    lengths = sorted({each for each in (*_CHAIN_LENGTHS, count) if each <= count})
    chains = [_nearest(cluster, by_speed) for by_speed in (False, True)]
    yield from dict.fromkeys(tuple(chain[:length]) for chain in chains for length in lengths)


def _nearest(cluster: Cluster, by_speed: bool) -> list[int]:
    """Return all machines, each next to the one with the best link from the last; fast ones first if wanted."""
    left, chain = set(range(1, len(cluster.machines))), [0]
    while left:

        def cost(number: int, last: int = chain[-1]) -> tuple[float, float, int]:
            path = cluster.path(last, number)
            link = path.delay_ms + path.wire_ms(1e6)
            speed = -(cluster.machines[number].tflops or 0.0)
            return (speed, link, number) if by_speed else (link, speed, number)

        chain.append(min(left, key=cost))
        left.remove(chain[-1])
    return chain


# (2) cuts


def _cut(
    predictor: Predictor, limits: Limits, chain: tuple[int, ...], layout: Layout, chunks: int, codecs: tuple[str, str]
) -> Candidate | None:
    """Return the candidate with the cuts whose busiest worker or link is least busy; None if there are none."""
    samples, units = predictor.batch_size // chunks, range(len(predictor.profile.units))
    work = [[sum(predictor.unit_ms(unit, samples, each, kind) for kind in "FB") for unit in units] for each in chain]
    state = [predictor.state_bytes(unit, unit + 1) for unit in units]
    most = [_least(predictor.cluster.machines[each].memory_bytes, limits.memory_bytes) for each in chain]
    stages = [stage_times(ms, state, most_bytes) for ms, most_bytes in zip(work, most, strict=True)]

    def link_ms(here: int, there: int) -> Times:
        """Return the time of the busier direction at every cut between two machines."""
        found = np.full(len(units) + 1, np.inf)
        for cut in units[1:]:
            sent = predictor.wire_bytes(cut, codecs[0], "forward", samples, chunks)
            returned = predictor.wire_bytes(cut, codecs[1], "backward", samples, chunks)
            path, back = predictor.cluster.path(here, there), predictor.cluster.path(there, here)
            found[cut] = max(path.wire_ms(sent), back.wire_ms(returned))
        return found

    hops = [link_ms(*pair) for pair in pairwise(chain if layout == "linear" else (*chain, chain[0]))]
    if layout == "linear":
        cuts = linear_cuts(stages, hops)
    else:
        cuts = client_server_cuts(work[0], stages[0], stages[1:], hops, limits.client_layers or (1, 1))
    if cuts is None:
        return None
    made = Candidate(parallel="pipeline", machines=chain, layout=layout, cuts=cuts, chunks=chunks)
    return replace(made, forward=codecs[0], backward=codecs[1])


def recut(predictor: Predictor, limits: Limits, candidate: Candidate, machines: tuple[int, ...]) -> Prediction | None:
    """Return the best prediction of a candidate on other machines, with new cuts; None if there are too few units."""
    assert candidate.layout is not None
    if stage_count(len(machines), candidate.layout) > len(predictor.profile.units):
        return None
    codecs = candidate.forward, candidate.backward
    made = _cut(predictor, limits, machines, candidate.layout, candidate.chunks, codecs)
    if made is None:
        return None
    return min(_simulated(predictor, limits, made), key=lambda each: each.step_ms)


def _least(*limits: int | None) -> float:
    return min((each for each in limits if each is not None), default=math.inf)


def _why_nothing_fits(predictor: Predictor, limits: Limits, found: Sequence[Prediction]) -> str:
    """Return one line: what does not fit into which memory, and by how much."""
    profile, machines = predictor.profile, predictor.cluster.machines
    largest = max(range(len(profile.units)), key=lambda unit: predictor.state_bytes(unit, unit + 1))
    needed = predictor.state_bytes(largest, largest + 1)
    roomiest = max(_least(each.memory_bytes, limits.memory_bytes) for each in machines)
    if needed > roomiest:
        return (
            f"{predictor.cluster.name} cannot hold the model: its unit {profile.units[largest].name} needs "
            f"{size_text(needed)}, {size_text(needed - int(roomiest))} more than any worker has "
            f"({size_text(int(roomiest))})"
        )
    total = predictor.state_bytes(0, len(profile.units))
    there = sum(_least(each.memory_bytes, limits.memory_bytes) for each in machines)
    if total > there:
        return (
            f"{predictor.cluster.name} cannot hold the model: weights, gradients and optimizer need "
            f"{size_text(total)}, {size_text(total - int(there))} more than the {len(machines)} workers have together "
            f"({size_text(int(there))})"
        )
    if not found:
        return (
            f"no plan for {predictor.cluster.name}: {len(profile.units)} units and a batch of {predictor.batch_size} "
            "cannot be cut under these limits; allow more layouts, microbatches or kinds of parallelism"
        )

    def excess(each: Prediction) -> tuple[float, int]:
        over = [
            (held - _least(machines[number].memory_bytes, limits.memory_bytes), rank)
            for rank, (held, number) in enumerate(zip(each.memory_bytes, each.candidate.machines, strict=True))
        ]
        return max(over)

    nearest = min(found, key=lambda each: excess(each)[0])
    over, rank = excess(nearest)
    return (
        f"{predictor.cluster.name} cannot hold the model: the plan that comes nearest lacks {size_text(round(over))} "
        f"on {machines[nearest.candidate.machines[rank]].name}, which needs {size_text(nearest.memory_bytes[rank])}"
    )
