"""Making a plan: the profile of the model, the machines, the search, and the result as text, record and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinpipe.lab.plan import verdict
from thinpipe.lab.plan.cluster import read_cluster
from thinpipe.lab.plan.model import planned_model
from thinpipe.lab.plan.plan_options import PlanOptions
from thinpipe.lab.plan.predictor import Predictor
from thinpipe.lab.plan.search import search
from thinpipe.lab.plan.timeline import bars_of
from thinpipe.lab.records.record import Record
from thinpipe.lab.records.report import Table
from thinpipe.options import OptionError
from thinpipe.pipeline.trace import draw
from thinpipe.train.resolve import resolve
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.tasks import task as find_task


@dataclass(frozen=True)
class Planned:
    """A plan that was made."""

    name: str
    settings: Settings
    verdict: verdict.Verdict

    def lines(self) -> list[str]:
        return verdict.lines(self.verdict)

    def table(self) -> Table:
        return verdict.table(self.verdict)

    def record(self, command: Sequence[str]) -> Record:
        """Return the record, from which `thinpipe train` runs the plan and later plans take measurements."""
        predictor = self.verdict.predictor
        config = {
            "command": command,
            "model": self.name,
            "batch_size": predictor.batch_size,
            "cluster": predictor.cluster.name,
            "machines": [asdict(each) for each in predictor.cluster.machines],
            "profile": predictor.profile.to_json(),
            "helps": dict(self.verdict.helps),
        }
        rows = verdict.rows(self.verdict)
        return Record(kind=verdict.KIND, config=config, columns=verdict.COLUMNS, rows=rows)

    def draw(self, path: Path) -> None:
        """Draw the predicted step of the plan, or of the best pipeline if the plan is none."""
        predictor = self.verdict.predictor
        for each in (self.verdict.best, *self.verdict.alternatives):
            if each.candidate.parallel == "pipeline":
                draw(bars_of(predictor, predictor.predict(each.candidate, record=True)), path)
                return
        raise OptionError("{picture} shows the stages of a pipeline, and none was found: leave it out")


def make_plan(options: PlanOptions, given: Mapping[str, Any]) -> Planned:
    """Return the best plan for the run of these options of `thinpipe train`; raise ValueError if there is none."""
    settings = settings_of(given)
    model = planned_model(settings)
    if options.cluster is None:
        raise OptionError("{cluster} describes the machines: name one")
    cluster = read_cluster(options.cluster)
    predictor = Predictor(model.profile(settings), cluster, settings.batch_size)
    limits = options.limits
    judged = verdict.judge(predictor, limits, search(predictor, limits), epochs=settings.epochs)
    return Planned(model.name, settings, judged)


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Return the settings of a run in one process."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.get("model") or chosen.get("config"):
        chosen.setdefault("task", "lm")
    task = find_task(chosen.get("task") or "digits")
    defaults = (task.model_defaults if chosen.get("model") else None) or task.defaults
    return resolve(chosen | {"parallel": "none", "task": task.name}, defaults, device="cpu")
