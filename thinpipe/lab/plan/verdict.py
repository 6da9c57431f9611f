"""The verdict of a plan: the best candidate, why others lose, the bottleneck, and what would help most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from thinpipe.codecs.recipes import directions
from thinpipe.lab.plan.predictor import Candidate, Prediction, Predictor, faster
from thinpipe.lab.plan.profile import stage_units
from thinpipe.lab.plan.search import NATS, Limits, recut
from thinpipe.lab.records.record import Row, column, columns_of, row_of
from thinpipe.lab.records.report import Table
from thinpipe.options import OptionError
from thinpipe.system.sizes import size_text

_ALTERNATIVES = 3
_HELPS = 1.02  # a smaller gain is not worth a line
_INTERVAL = 0.11  # nine of ten measured steps are this close to the predicted ones: benchmarks/plan


@dataclass(frozen=True, kw_only=True)
class PlanColumns:
    """A candidate; the first row is the plan."""

    role: str = column("", key=True)
    parallel: str = column("parallel", key=True)
    workers: int = column("workers", key=True, format="d")
    layout: str | None = column("layout", key=True)
    schedule: str | None = column("schedule", key=True)
    chunks: int = column("micro-\nbatches", key=True, format="d")
    codec: str | None = column("codec", key=True)
    recompute: bool | None = column("recompute", key=True)
    step_ms: float = column("step\nms", format=".1f", better="lower")
    low_ms: float | None = column("low\nms", format=".1f")
    high_ms: float | None = column("high\nms", format=".1f")
    samples_per_s: float = column("samples\nper s", format=".1f", better="higher")
    wire_bytes: int = column("wire\nbytes", format="d", better="lower")
    peak_mib: float = column("peak MiB\nper worker", format=".0f", better="lower")
    bottleneck: str = column("bottleneck")
    why: str = column("why it loses")
    machines: Sequence[str]
    cuts: Sequence[int]
    memory_bytes: Sequence[int]
    options: Mapping[str, Any]  # of `thinpipe train`


COLUMNS = columns_of(PlanColumns)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The best prediction and everything that is printed about it."""

    predictor: Predictor
    limits: Limits
    best: Prediction
    alternatives: tuple[Prediction, ...]
    alone: Prediction | None
    helps: tuple[tuple[str, float], ...]  # changes, and the factor of speed that each brings
    spread: float | None  # half of the interval, relative; None: speeds are stated
    epochs: int = 1


def judge(predictor: Predictor, limits: Limits, found: Sequence[Prediction], *, epochs: int = 1) -> Verdict:
    """Return the verdict on the predictions of a search, the best first."""
    best = found[0]
    alone = next((each for each in found if each.candidate.parallel == "none"), None)
    return Verdict(
        predictor=predictor,
        limits=limits,
        best=best,
        alternatives=tuple(_different(found))[:_ALTERNATIVES],
        alone=alone,
        helps=tuple(sorted(_helps(predictor, limits, best), key=lambda each: -each[1])),
        spread=max(predictor.profile.spread, _INTERVAL) if predictor.profile.spread else None,
        epochs=epochs,
    )


def _different(found: Sequence[Prediction]) -> Iterator[Prediction]:
    """Yield the best of every other way: no pipeline, another layout, number of workers or codec."""

    def way(each: Prediction, *, codec: bool) -> tuple[Any, ...]:
        made = each.candidate
        return made.parallel, made.layout, len(made.machines), made.compress if codec else ""

    seen = {way(found[0], codec=False)}
    for each in found[1:]:
        if way(each, codec=False) not in seen:
            seen.add(way(each, codec=False))
            yield each
    codecs = {way(found[0], codec=True)}
    for each in found[1:]:
        if way(each, codec=False) == way(found[0], codec=False) and way(each, codec=True) not in codecs:
            codecs.add(way(each, codec=True))
            yield each


def _helps(predictor: Predictor, limits: Limits, best: Prediction) -> Iterator[tuple[str, float]]:
    """Yield changes of cluster or limits with their gain: the same plan, or the same one with one more machine."""
    cluster, made = predictor.cluster, best.candidate
    others = {"machines twice as fast": faster(cluster, 2.0)} if cluster.machines[0].tflops else {}
    if best.wire_bytes:
        others |= {"twice the rate of the links": cluster.scaled(rate=2.0), "half the delay": cluster.scaled(delay=0.5)}
    for name, other in others.items():
        yield name, best.step_ms / predictor.with_cluster(other).predict(made).step_ms
    if made.parallel == "pipeline":
        names = list(NATS)
        fewer = names[names.index(made.compress) + 1 :] if made.compress in names else []
        for spec in fewer[:1]:
            forward, backward = directions(spec)
            than = replace(made, forward=forward, backward=backward)
            gain = best.step_ms / predictor.predict(than).step_ms
            yield f"fewer bits, {spec}, for up to {NATS[spec]:g} nats", gain
        last = cluster.machines[made.machines[-1]]
        more = replace(cluster, machines=(*cluster.machines, replace(last, name=f"another {last.kind or last.name}")))
        with suppress(OptionError):  # machines of this kind have no links to each other
            longer = recut(predictor.with_cluster(more), limits, made, (*made.machines, len(cluster.machines)))
            if longer is not None:
                yield f"one more machine like {last.name}", best.step_ms / longer.step_ms


def _per_s(verdict: Verdict, each: Prediction) -> float:
    profile = verdict.predictor.profile
    return verdict.predictor.batch_size * profile.per_sample / each.step_ms * 1e3


def lines(verdict: Verdict) -> list[str]:
    """Return the verdict as lines of at most 80 characters; the first ones say whether it pays."""
    predictor, best = verdict.predictor, verdict.best
    machines, profile = predictor.cluster.machines, predictor.profile
    unit = f"{profile.unit_of_speed}/s"
    about = " (stated speeds)" if verdict.spread is None else f" ± {verdict.spread:.0%}".replace("%", " %")
    count = len(best.candidate.machines)
    who = f"{count} machines" if count > 1 else f"{machines[0].name} alone, no pipeline"
    first = f"{who}: {_per_s(verdict, best):,.0f} {unit}{about}"
    if count > 1 and verdict.alone is not None:
        factor = verdict.alone.step_ms / best.step_ms
        first += f"; {machines[0].name} alone: {_per_s(verdict, verdict.alone):,.0f}, {factor:.1f} times slower"
    elif count > 1 and "none" in verdict.limits.parallel:
        first += f"; {machines[0].name} alone cannot hold it"
    found = [first, _work(verdict)]
    found += ["", f"Plan: {describe(best.candidate)}"]
    found += [f"  {line}" for line in _workers(verdict)]
    share = f"{min(best.busy, 1.0):.0%}".replace("%", " %")
    found += ["", f"Bottleneck: {best.bottleneck}, busy for {share} of a step of {best.step_ms:,.0f} ms"]
    useful = [(name, gain) for name, gain in verdict.helps if gain >= _HELPS]
    found += [f"  {name}: {gain:.2f} times as fast" for name, gain in useful] or ["  nothing tried here would help"]
    if verdict.alternatives:
        found += ["", "Alternatives:"]
    for each in verdict.alternatives:
        found.append(f"  {describe(each.candidate)}")
        found.append(f"    {_per_s(verdict, each):,.0f} {unit}: {_why(verdict, each)}")
    return found


def _work(verdict: Verdict) -> str:
    """Return a line with the hours and bytes of the whole training, or of a million samples if there is no data."""
    profile, best = verdict.predictor.profile, verdict.best
    samples = verdict.epochs * (profile.train_samples or 1_000_000 // profile.per_sample)
    steps = samples / verdict.predictor.batch_size
    hours = steps * best.step_ms / 3.6e6
    took = f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:,.1f} min" if hours > 0.02 else f"{hours * 3600:,.0f} s"
    what = "your data" if profile.train_samples else f"every million {profile.unit_of_speed}"
    over = f", {size_text(round(steps * best.wire_bytes))} over the links" if best.wire_bytes else ""
    return f"{took} for {what}{over}"


def describe(made: Candidate) -> str:
    """Return a candidate in words."""
    parts = f", {made.chunks} microbatches" if made.chunks > 1 else ""
    if made.parallel == "none":
        return f"one process{parts}"
    if made.parallel == "data":
        return f"data-parallel, {len(made.machines)} replicas{parts}"
    again = ", recompute" if made.recompute else ""
    return f"{made.layout}, {len(made.machines)} workers, {made.schedule}{parts}, {made.compress}{again}"


def _workers(verdict: Verdict) -> Iterator[str]:
    """Yield what every worker holds, alike ones together."""
    made, profile = verdict.best.candidate, verdict.predictor.profile
    bounds = stage_units(made.cuts, len(profile.units))
    for rank, (number, held) in enumerate(zip(made.machines, verdict.best.memory_bytes, strict=True)):
        machine = verdict.predictor.cluster.machines[number]
        units = [
            f"{first} to {end - 1}" if end - first > 1 else f"{first}"
            for stage, (first, end) in enumerate(bounds)
            if made.parallel != "pipeline" or made.placement[stage] == rank
        ]
        of = "" if machine.memory_bytes is None else f" of {size_text(machine.memory_bytes)}"
        noun = "unit" if len(units) == 1 and units[0].isdecimal() else "units"
        yield f"worker {rank}, {machine.name}: {noun} {' and '.join(units)}; {size_text(held)}{of}"


def _why(verdict: Verdict, each: Prediction) -> str:
    best = verdict.best
    slower = each.step_ms / best.step_ms
    if slower < 1.005:
        return "as fast"
    if each.bottleneck == "the exchange of gradients":
        return f"{slower:.2f} times slower; gradients are {size_text(each.wire_bytes)} a step"
    if each.candidate.parallel == "none":
        return f"{slower:.2f} times slower; one machine computes all"
    share = f"{min(each.busy, 1.0):.0%}".replace("%", " %")
    reason = f"{each.bottleneck} is busy {share}" if each.busy > 0.6 else "workers wait for delays"
    return f"{slower:.2f} times slower; {reason}"


def options_of_plan(made: Candidate, batch_size: int) -> dict[str, Any]:
    """Return the options of `thinpipe train` that run a candidate."""
    found: dict[str, Any] = {"parallel": made.parallel, "workers": len(made.machines), "batch_size": batch_size}
    if made.chunks > 1 or made.parallel == "pipeline":
        found["chunks"] = made.chunks
    if made.parallel == "pipeline":
        found |= {"layout": made.layout, "schedule": made.schedule, "cuts": ",".join(map(str, made.cuts))}
        found |= {"compress_forward": made.forward, "compress_backward": made.backward}
        found |= {"recompute": True} if made.recompute else {}
    return found


def rows(verdict: Verdict) -> tuple[Row, ...]:
    """Return the rows of the record: the plan and its alternatives."""
    batch, machines, spread = verdict.predictor.batch_size, verdict.predictor.cluster.machines, verdict.spread
    found = []
    for role, each in (("plan", verdict.best), *(("alternative", each) for each in verdict.alternatives)):
        made = each.candidate
        is_pipeline = made.parallel == "pipeline"
        columns = PlanColumns(
            role=role,
            parallel=made.parallel,
            workers=len(made.machines),
            layout=made.layout,
            schedule=made.schedule,
            chunks=made.chunks,
            codec=made.compress if is_pipeline else None,
            recompute=made.recompute if is_pipeline else None,
            step_ms=each.step_ms,
            low_ms=None if spread is None else each.step_ms * (1 - spread),
            high_ms=None if spread is None else each.step_ms * (1 + spread),
            samples_per_s=batch / each.step_ms * 1e3,
            wire_bytes=each.wire_bytes,
            peak_mib=max(each.memory_bytes) / 2**20,
            bottleneck=each.bottleneck,
            why="" if role == "plan" else _why(verdict, each),
            machines=[machines[number].name for number in made.machines],
            cuts=made.cuts,
            memory_bytes=each.memory_bytes,
            options=options_of_plan(made, batch),
        )
        found.append(row_of(columns))
    return tuple(found)


def table(verdict: Verdict) -> Table:
    """Return the table of the page and the record."""
    return Table(title=f"Plans for {verdict.predictor.cluster.name}", columns=COLUMNS, rows=rows(verdict))
