"""Tables of a training run: its stages and links before the first step, results, traffic and times at its end."""

from __future__ import annotations

from collections.abc import Sequence

from thinpipe.lab.records.record import Column, Row, columns_of, row_of
from thinpipe.lab.records.report import Table
from thinpipe.lab.records.step_times import StepTimes
from thinpipe.lab.runs.summary import columns, make_result, run_step_times
from thinpipe.pipeline.report import LinkReport
from thinpipe.train.events import Finished, Holding, LinkPlan, Plan

SHORT_RUN = 4  # runs of at most this many times the steps before the PCA basis is known get a note on those steps
_WORKER = Column(name="worker", heading="worker", key=True)
_HOLDING_COLUMNS = (
    Column(name="stage", heading="stage", key=True),
    _WORKER,
    Column(name="units", heading="units", key=True),
    Column(name="parameters", heading="parameters", format=",d"),
    Column(name="share", heading="share", format=".1%"),
)
_TRAINED_COLUMN = Column(name="trained", heading="of these\ntrained", format=",d")
_LINK_COLUMNS = (
    Column(name="link", heading="stages", key=True),
    Column(name="direction", heading="direction", key=True),
    Column(name="codec", heading="codec", key=True),
    Column(name="tensors", heading="a chunk's\ntensors"),
    Column(name="tensor_kb", heading="tensors\nkB", format=".1f"),
    Column(name="wire_kb", heading="wire\nkB", format=".1f"),
    Column(name="wire_ratio", heading="wire\nratio", format=".3f"),
)
_TIME_COLUMNS = (*columns_of(StepTimes), Column(name="peak_mib", heading="peak\nMiB", format=".0f"))
_TIME_NOTES = {
    "pipeline": "wait: for a sender that has nothing to send yet.\ntransfer: as much of it as computing does not hide.",
    "data": "compute: and the exchange of gradients, which overlaps it.",
    "none": "",
}


def plan_tables(plan: Plan) -> list[Table]:
    """Return the tables of stages and, if there are any, of links."""
    rows = [
        {
            "stage": str(holding.stage),
            "worker": _worker_name(plan, holding.worker),
            "units": _unit_range(holding),
            "parameters": holding.parameters,
            "share": holding.parameters / max(plan.parameters, 1),
            "trained": holding.trained,
        }
        for holding in plan.holdings
    ]
    frozen = plan.trained < plan.parameters
    columns = (*_HOLDING_COLUMNS, _TRAINED_COLUMN) if frozen else _HOLDING_COLUMNS
    tables = [Table(title=_title(plan), columns=columns, rows=rows)]
    if plan.links:
        links = [_link_row(plan, link) | {"tensors": _shapes_text(link)} for link in plan.links]
        tables.append(
            Table(title=f"Traffic per {_per(plan)}", columns=_LINK_COLUMNS, rows=links, note=_plan_notes(plan))
        )
    return tables


def end_tables(plan: Plan, end: Finished, wire_bytes: int) -> list[Table]:
    """Return the tables of results, traffic and times; ``wire_bytes`` is the sum over workers and steps."""
    result = make_result(plan, end, wire_bytes=wire_bytes)
    tables = [Table(title="Result", columns=columns(result, plan), rows=[row_of(result)])]
    if end.links:
        links = [*(_link_row(plan, link, steps=end.steps) for link in end.links), *_sums(end)]
        tables.append(Table(title="Traffic per step, measured", columns=_LINK_COLUMNS, rows=links))
    tables.append(
        Table(
            title="Where the time of a step goes",
            columns=(_WORKER, *_TIME_COLUMNS),
            rows=_worker_rows(plan, end),
            note=_TIME_NOTES[plan.parallel],
        )
    )
    return tables


def _worker_rows(plan: Plan, end: Finished) -> list[Row]:
    """Return the times of a step on each worker."""
    return [
        {
            "worker": _worker_name(plan, worker.worker),
            **row_of(run_step_times(end, worker)),
            "peak_mib": worker.peak_mib,
        }
        for worker in end.workers
    ]


def _title(plan: Plan) -> str:
    workers = f"{plan.workers} worker" + "s" * (plan.workers != 1)
    how = {"pipeline": f"pipeline of {workers}", "data": f"data-parallel, {workers}", "none": "one process"}
    order = f", {plan.schedule}" if plan.schedule not in (None, "gpipe") else ""
    chunks = f" in {plan.chunks} chunks{order}" if plan.parallel == "pipeline" else ""
    steps = f", {plan.accumulate} to a step" if plan.accumulate > 1 else ""
    trained = f", {plan.trained:,} of them trained" if plan.trained < plan.parameters else ""
    return (
        f"{plan.task}: {how[plan.parallel]}, {plan.parameters:,} parameters{trained}\n"
        f"{plan.train_samples} samples to train on, {plan.validation_samples} to validate; "
        f"batches of {plan.batch_size}{chunks}{steps}"
    )


def _per(plan: Plan) -> str:
    """Return the unit of the traffic of links."""
    return "step" if plan.accumulate == 1 else "batch"


def _worker_name(plan: Plan, worker: int) -> str:
    """Return a worker's number, marked as the client if it has several stages (client-server layout)."""
    stages = [holding for holding in plan.holdings if holding.worker == worker]
    return f"{worker}, client" if plan.parallel == "pipeline" and len(stages) > 1 else str(worker)


def _unit_range(holding: Holding) -> str:
    """Return the numbers of the units, and the names of the first and the last: ``1-18 Stem to Head``."""
    first, last = holding.first_unit, holding.first_unit + holding.units - 1
    numbers = f"{first}" if first == last else f"{first}-{last}"
    return f"{numbers} {' to '.join(dict.fromkeys((holding.unit_names[0], holding.unit_names[-1])))}"


def _shapes_text(link: LinkPlan) -> str:
    return " + ".join("x".join(map(str, shape)) for shape in link.shapes)


def _plan_notes(plan: Plan) -> str:
    """Return the notes on links, as lines.

    They report gradients that are not needed, bytes of the first steps, floats that are not compressed, and integers,
    such as masks, that may need fewer bytes than the table shows.
    """
    notes = []
    back = {(link.target, link.source) for link in plan.links}
    silent = [f"{link.target} to {link.source}" for link in plan.links if (link.source, link.target) not in back]
    if silent:
        notes.append(f"No gradients from stage {', '.join(silent)}: nothing that they would reach is trained.")
    more = [link for link in plan.links if link.first_wire_bytes is not None]
    if more:
        first_kb = sum(link.first_wire_bytes or 0 for link in more) / 1e3
        again_kb = sum(link.wire_bytes for link in more) / 1e3
        learned_kb = sum(link.learned_bytes for link in more) / 1e3
        first_steps = max(link.first_steps for link in more)
        until = f"in the first {first_steps} steps" if learned_kb else "while samples are new"
        then = f", of which {learned_kb:.1f} kB are updates of the basis, not in every step." if learned_kb else "."
        notes.append(
            f"{more[0].spec}: {first_kb:.1f} kB a {_per(plan)} forward {until}, {again_kb:.1f} kB after that{then}"
        )
        notes += _first_steps_notes(plan, first_steps, max(link.first_bits for link in more))
    for reason in dict.fromkeys(link.uncompressed for link in plan.links if link.uncompressed):
        links = ", ".join(f"{link.source} to {link.target}" for link in plan.links if link.uncompressed == reason)
        notes.append(f"Nothing is compressed from stage {links}: {reason}.")
    integer_kb = sum(link.integer_bytes for link in plan.links) / 1e3
    if integer_kb:
        notes.append(
            f"At most: {integer_kb:.1f} kB of it are masks or other integers, sent in as few bits as they need."
        )
    return "\n".join(notes)


def _first_steps_notes(plan: Plan, first_steps: int, bits: int) -> list[str]:
    """Return a note on the part of a short run that uses more bits than its codec; links count batches, not steps."""
    batches, before = plan.last_step * plan.accumulate, plan.first_step * plan.accumulate
    if before >= first_steps or batches > SHORT_RUN * first_steps:
        return []
    unit = "steps" if plan.accumulate == 1 else "batches"
    first = f"the first {min(first_steps, batches)} of {batches} {unit}"
    return [f"The activations of {first} are sent at {bits} bits, before the basis is learned."]


def _link_row(plan: Plan, link: LinkPlan | LinkReport, steps: int = 1) -> dict[str, object]:
    return {
        "link": f"{link.source} to {link.target}",
        "direction": link.direction,
        "codec": next(each.spec for each in plan.links if each.direction == link.direction),
        **_traffic(link.tensor_bytes, link.wire_bytes, steps),
    }


def _sums(end: Finished) -> list[Row]:
    """Return the sums over all links by direction, for comparing runs; none for a direction with one link."""
    sums: list[Row] = []
    for direction in ("forward", "backward"):
        links = [link for link in end.links if link.direction == direction]
        if len(links) > 1:
            sums.append({"link": "all", "direction": direction, "codec": "", **_total(links, end.steps)})
    return sums


def _total(links: Sequence[LinkReport], steps: int) -> dict[str, float | None]:
    return _traffic(sum(link.tensor_bytes for link in links), sum(link.wire_bytes for link in links), steps)


def _traffic(tensor_bytes: int, wire_bytes: int, steps: int) -> dict[str, float | None]:
    steps = max(steps, 1)
    ratio = wire_bytes / tensor_bytes if tensor_bytes else None
    return {"tensor_kb": tensor_bytes / steps / 1e3, "wire_kb": wire_bytes / steps / 1e3, "wire_ratio": ratio}
