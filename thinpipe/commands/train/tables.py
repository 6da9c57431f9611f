"""A run as tables: who holds what before it starts, what it came to when it is over."""

from __future__ import annotations

from collections.abc import Sequence

from thinpipe.commands.train.record import Parts, Result, columns, make_result, step_parts
from thinpipe.measure.record import Column, Row, columns_of, row_of
from thinpipe.measure.report import Table
from thinpipe.training.events import Finished, Holding, LinkPlan, LinkUse, Plan

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
_PART_COLUMNS = (*columns_of(Parts), Column(name="peak_mib", heading="peak\nMiB", format=".0f"))
_PART_NOTES = {
    "pipeline": "wait: for a sender that has nothing to send yet.\ntransfer: as much of it as computing does not hide.",
    "data": "compute: and the exchange of gradients, which runs beside it.",
    "none": "",
}


def plan_tables(plan: Plan) -> list[Table]:
    """Who holds what; and what each link carries, if there are links."""
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
        links = [_link_row(link) | {"tensors": _shapes_text(link)} for link in plan.links]
        tables.append(
            Table(title=f"What travels per {_per(plan)}", columns=_LINK_COLUMNS, rows=links, note=_plan_notes(plan))
        )
    return tables


def end_tables(plan: Plan, end: Finished, wire_bytes: int) -> list[Table]:
    """What came out, what travelled, where the time of a step went. ``wire_bytes`` were sent by all, in all steps."""
    row = row_of(make_result(plan, end, wire_bytes=wire_bytes))
    tables = [Table(title="Result", columns=columns(Result, plan), rows=[row])]
    if end.links:
        links = [*(_link_row(link, steps=end.steps) for link in end.links), *_sums(end)]
        tables.append(Table(title="What travelled per step", columns=_LINK_COLUMNS, rows=links))
    tables.append(
        Table(
            title="Where the time of a step goes",
            columns=(_WORKER, *_PART_COLUMNS),
            rows=worker_rows(plan, end),
            note=_PART_NOTES[plan.parallel],
        )
    )
    return tables


def worker_rows(plan: Plan, end: Finished) -> list[Row]:
    """The parts of a step on every worker."""
    return [
        {
            "worker": _worker_name(plan, worker.worker),
            **row_of(step_parts(end, worker)),
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
    """What the traffic of links is told for."""
    return "step" if plan.accumulate == 1 else "batch"


def _worker_name(plan: Plan, worker: int) -> str:
    """A worker that has several stages is the client of a client-server layout."""
    stages = [holding for holding in plan.holdings if holding.worker == worker]
    return f"{worker}, client" if plan.parallel == "pipeline" and len(stages) > 1 else str(worker)


def _unit_range(holding: Holding) -> str:
    """The numbers of the units, and what the first and the last are: ``1-18 Stem to Head``."""
    first, last = holding.first_unit, holding.first_unit + holding.units - 1
    numbers = f"{first}" if first == last else f"{first}-{last}"
    return f"{numbers} {' to '.join(dict.fromkeys((holding.unit_names[0], holding.unit_names[-1])))}"


def _shapes_text(link: LinkPlan) -> str:
    return " + ".join("x".join(map(str, shape)) for shape in link.shapes)


def _plan_notes(plan: Plan) -> str:
    """What the table does not say: which gradients are not needed; and that links carry more while samples are new to
    them, and less than it says of masks."""
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
        then = f", of which {learned_kb:.1f} kB tell axes, every so many steps." if learned_kb else "."
        notes.append(
            f"{more[0].spec}: {first_kb:.1f} kB a {_per(plan)} forward {until}, {again_kb:.1f} kB after that{then}"
        )
    integer_kb = sum(link.integer_bytes for link in plan.links) / 1e3
    if integer_kb:
        notes.append(
            f"At most: {integer_kb:.1f} kB of it are masks or other integers, which travel in as few bits as they need."
        )
    return "\n".join(notes)


def _link_row(link: LinkPlan | LinkUse, steps: int = 1) -> dict[str, object]:
    return {
        "link": f"{link.source} to {link.target}",
        "direction": link.direction,
        "codec": link.spec,
        **_traffic(link.tensor_bytes, link.wire_bytes, steps),
    }


def _sums(end: Finished) -> list[Row]:
    """All links together in each direction: the line to compare runs by. One link has nothing to add up."""
    sums: list[Row] = []
    for direction in ("forward", "backward"):
        links = [link for link in end.links if link.direction == direction]
        if len(links) > 1:
            sums.append({"link": "all", "direction": direction, "codec": "", **_total(links, end.steps)})
    return sums


def _total(links: Sequence[LinkUse], steps: int) -> dict[str, float | None]:
    return _traffic(sum(link.tensor_bytes for link in links), sum(link.wire_bytes for link in links), steps)


def _traffic(tensor_bytes: int, wire_bytes: int, steps: int) -> dict[str, float | None]:
    steps = max(steps, 1)
    ratio = wire_bytes / tensor_bytes if tensor_bytes else None
    return {"tensor_kb": tensor_bytes / steps / 1e3, "wire_kb": wire_bytes / steps / 1e3, "wire_ratio": ratio}
