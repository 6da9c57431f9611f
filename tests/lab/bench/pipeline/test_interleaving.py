"""Rows of the pipeline benchmark alternate step by step, whatever their number of workers."""

from typing import ClassVar

from thinpipe.lab.bench.models import Shapes
from thinpipe.lab.bench.pipeline import measuring
from thinpipe.lab.bench.pipeline.pipeline_columns import WorkerMeasurements
from thinpipe.lab.bench.pipeline.pipeline_options import PipelineBenchOptions
from thinpipe.launch.workers import run_workers

STEPS = 3
ROWS = ("none", "data 2", "pipeline 2", "data 4", "pipeline 4")


class Noted:
    """In place of a model: notes its turns."""

    turns: ClassVar[list[str]] = []

    def __init__(self, run, settings, world, costs):
        self.name = run.parallel if run.workers == 1 else f"{run.parallel} {run.workers}"
        assert world.worker < run.workers == world.workers

    def turn(self):
        self.turns.append(self.name)

    def measured(self):
        self.turns.append(f"{self.name} over")
        return WorkerMeasurements(
            samples_ms=(1.0,), compute_samples_ms=(1.0,), peak_bytes=None, parameter_bytes=1, threads=1, module_ms=1.0,
            update_ms=0.0, stage_ms={0: (1.0, 1.0)}, links=(), link_steps=1, cuts=(), order="gpipe",
        )  # fmt: skip


def note_turns(settings):
    measuring._Trainer = Noted
    measuring.make_row = lambda options, variant, workers: {"workers": len(workers)}
    measuring.row_line = str
    rows = measuring.measure_variants(settings, None, lambda row: None, lambda line: None)
    return rows, Noted.turns


def noted(**changed):
    shapes = Shapes(batch_size=4, hidden=8, layers=2)
    settings = PipelineBenchOptions(
        shapes=shapes,
        model="mlp",
        workers=(1, 2, 4),
        compress=("none",),
        chunks=(2,),
        threads=1,
        steps=STEPS,
        **changed,
    )
    return run_workers(note_turns, settings, workers=4, backend="gloo")


def test_each_round_has_one_turn_of_every_row_on_its_workers():
    (rows, client), (_, second), (_, third), (_, fourth) = noted()
    rounds = [client[start : start + len(ROWS)] for start in range(0, STEPS * len(ROWS), len(ROWS))]
    assert [sorted(each) for each in rounds] == [sorted(ROWS)] * STEPS
    assert len({tuple(each) for each in rounds}) > 1  # shuffled
    assert client[STEPS * len(ROWS) :] == [f"{name} over" for name in ROWS]
    assert [row["workers"] for row in rows] == [1, 2, 2, 4, 4]
    assert second == [name for name in client if not name.startswith("none")]
    assert third == fourth == [name for name in client if "4" in name]


def test_one_row_after_the_other():
    (_, client), *_ = noted(interleave=1)
    assert client == [turn for name in ROWS for turn in (*[name] * STEPS, f"{name} over")]
