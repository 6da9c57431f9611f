"""Making a plan: the profile of the model, the machines, the search, and the result as text, record and picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from thinpipe.codecs.recipes import directions
from thinpipe.lab.netem.network import check_launch
from thinpipe.lab.plan import verdict
from thinpipe.lab.plan.calibration import calibrate
from thinpipe.lab.plan.cluster import read_cluster
from thinpipe.lab.plan.crowding import crowd, crowded_ms
from thinpipe.lab.plan.model import planned_model
from thinpipe.lab.plan.network import LinkTimes, measure_links, measured_cluster
from thinpipe.lab.plan.plan_file import KIND
from thinpipe.lab.plan.plan_options import PlanOptions
from thinpipe.lab.plan.predictor import Predictor, samples_per_chunk
from thinpipe.lab.plan.profile import ModelProfile
from thinpipe.lab.plan.search import search
from thinpipe.lab.plan.timeline import bars_of
from thinpipe.lab.records.record import Record
from thinpipe.lab.records.report import Table
from thinpipe.launch.workers import run_workers
from thinpipe.options import OptionError, read
from thinpipe.pipeline.trace import draw
from thinpipe.system.sizes import memory_bytes
from thinpipe.train.engines.world import join_world
from thinpipe.train.resolve import resolve
from thinpipe.train.settings import Settings
from thinpipe.train.shaping import link_text
from thinpipe.train.tasks.tasks import task as find_task


@dataclass(frozen=True)
class Planned:
    """A plan that was made."""

    name: str
    options: Mapping[str, Any]  # of the run, as given
    verdict: verdict.Verdict
    link: LinkTimes | None = None  # as measured

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
            "options": self.options,
            "cluster": predictor.cluster.name,
            "machines": [asdict(each) for each in predictor.cluster.machines],
            "profile": predictor.profile.to_json(),
            "link": self.link and asdict(self.link),
            "helps": dict(self.verdict.helps),
        }
        rows = verdict.rows(self.verdict)
        return Record(kind=KIND, config=config, columns=verdict.COLUMNS, rows=rows)

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
    settings, limits, links = settings_of(given), options.limits, None
    if options.cluster is not None:
        cluster, name = read_cluster(options.cluster), settings.model or settings.config or settings.task
        profile = planned_model(settings).profile(settings)
    else:
        check_launch([options.workers], [options.link])
        profile, links = _measured(options, settings)
        name = profile.name
        memory = memory_bytes(settings.devices[0]) // options.workers
        cluster = measured_cluster(options.link, options.workers, links, slowdown=profile.slowdown, memory_bytes=memory)
    predictor = Predictor(profile, cluster, settings.batch_size)
    judged = verdict.judge(predictor, limits, search(predictor, limits), epochs=settings.epochs)
    options_given = {
        name: value if isinstance(value, bool | int | float | list) else str(value)
        for name, value in given.items()
        if value not in (None, [])
    }
    return Planned(name, options_given, judged, links)


def _measured(options: PlanOptions, settings: Settings) -> tuple[ModelProfile, LinkTimes]:
    """Return the measured profile of the model and times of the link: those of a record, or new ones."""
    if options.from_ is not None:
        config = Record.read(options.from_).config
        if not config.get("link") or config.get("batch_size") != settings.batch_size:
            raise OptionError(f"{{from_}} {options.from_} has no measurements of batches of {settings.batch_size}")
        return ModelProfile.from_json(config["profile"]), LinkTimes(**config["link"])
    counts = samples_per_chunk(settings.batch_size)
    sizes = [settings.batch_size // count for count in {1, *(options.chunks or counts)}]
    codecs = [directions(spec) for spec in options.limits.codecs() if spec != "none"]
    # All workers are on this machine: each stands for a machine with its share of the cores.
    threads = settings.threads or max(1, (os.cpu_count() or 1) // options.workers)
    settings = replace(settings, threads=threads)
    found = run_workers(_calibrate, settings, sizes, codecs, workers=1)[0]
    profile = crowd(
        ModelProfile.from_json(found),
        lambda count, *facts: run_workers(crowded_step, settings, *facts, workers=count)[0],
        options.workers,
        settings.batch_size,
        min(sizes),
    )
    return profile, measure_links([options.link])[link_text(options.link)]


def _calibrate(settings: Settings, sizes: Sequence[int], codecs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the measured profile as JSON; runs in a worker of its own."""
    world, model = join_world(settings.devices, threads=settings.threads), planned_model(settings)
    profile = model.profile(settings)
    return calibrate(profile, model, world, sizes=sizes, codecs=codecs, amp=settings.amp).to_json()


def crowded_step(settings: Settings, cuts: Sequence[int], samples: int) -> float:
    """Return the time of a step while all workers compute."""
    world, model = join_world(settings.devices[0], threads=settings.threads), planned_model(settings)
    profile, size = model.profile(settings), settings.batch_size
    return crowded_ms(profile, model, world, cuts, batch_size=size, samples=samples, amp=settings.amp)


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Return the settings of a run in one process."""
    chosen = read(Settings, given)
    if chosen.get("model") or chosen.get("config"):
        chosen.setdefault("task", "lm")
    task = find_task(chosen.get("task") or "digits")
    defaults = (task.model_defaults if chosen.get("model") else None) or task.defaults
    return resolve(chosen | {"parallel": "none", "task": task.name}, defaults, device="cpu")
