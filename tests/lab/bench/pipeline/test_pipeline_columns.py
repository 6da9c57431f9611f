"""Rows of the pipeline benchmark: what workers measured becomes speeds, bounds and parts."""

from dataclasses import replace

import pytest

from tests.lab.bench.pipeline.made_links import link
from thinpipe.lab.bench.models import Shapes
from thinpipe.lab.bench.pipeline.pipeline_columns import COLUMNS, WorkerMeasurements, compare, make_row
from thinpipe.lab.bench.pipeline.pipeline_options import PipelineBenchOptions, Variant
from thinpipe.lab.bench.pipeline.pipeline_tables import describe, plot_speed, result_tables, row_line
from thinpipe.train.shaping import shaping_of

STEPS, BATCH = 2, 16
PIPELINE = Variant(
    workers=2, parallel="pipeline", layout="client-server", schedule="gpipe", chunks=4, compress="none"
)  # fmt: skip
DATA = Variant(workers=2, link=shaping_of(100.0), parallel="data")


def settings(**changed):
    given = {
        "model": "mlp", "shapes": Shapes(batch_size=BATCH, image_size=32, tokens=8), "workers": (1, 2),
        "links": (None, shaping_of(100.0)), "parallel": ("none", "data", "pipeline"),
        "layouts": ("linear", "client-server"), "schedules": ("gpipe",), "chunks": (2, 4),
        "compress": ("none", "sort:8"), "client_layers": None,
        "device": "cpu", "threads": 1, "warmup": 1, "steps": STEPS,
    }  # fmt: skip
    return PipelineBenchOptions(**given | changed)


def measured(step_ms=100.0, module_ms=30.0, links=(), stage_ms=None):
    return WorkerMeasurements(
        samples_ms=(step_ms, step_ms), compute_samples_ms=(module_ms + 2.0,) * 2, peak_bytes=2**20,
        parameter_bytes=1_000_000, threads=1, module_ms=module_ms, update_ms=2.0, stage_ms=stage_ms or {},
        links=tuple(links), link_steps=STEPS, cuts=(), order="gpipe" if stage_ms else None,
    )  # fmt: skip


def pipeline_row(link_mbit_per_s=100.0, step_ms=100.0):
    # Per step, 1 MB to the server and half of that back: 80 and 40 ms at 100 Mbit/s.
    links = [link(0, 1, 1_000_000 * STEPS), link(1, 0, 500_000 * STEPS)]
    workers = [
        measured(step_ms, 10.0, links, {0: (1.0, 2.0), 2: (0.5, 0.5)}),
        measured(step_ms, 30.0, links, {1: (1.0, 2.0)}),
    ]
    return make_row(settings(), replace(PIPELINE, link=link_mbit_per_s and shaping_of(link_mbit_per_s)), workers)


def test_number_of_chunks_in_flight():
    assert pipeline_row()["in_flight"] == PIPELINE.chunks
    workers = [replace(measured(stage_ms={index: (1.0, 2.0)}), order="1f1b:2") for index in range(2)]
    row = make_row(settings(), replace(PIPELINE, layout="linear", schedule="1f1b"), workers)
    assert (row["schedule"], row["in_flight"]) == ("1f1b", 2)
    assert "1f1b, 2 over none, 4 chunks, 2 in flight, " in describe(row)


def test_time_of_the_order_on_its_links():
    """Each of four chunks takes 20 ms up and 10 ms down; the last one is computed after all are up."""
    links = [link(0, 1, 1_000_000 * STEPS), link(1, 0, 500_000 * STEPS, stages=(1, 0))]
    workers = [measured(links=links, stage_ms={index: (1.0, 2.0)}) for index in range(2)]
    row = make_row(settings(), replace(PIPELINE, layout="linear", link=shaping_of(100.0)), workers)
    assert row["order_ms"] == pytest.approx(1 + 4 * 20 + 1 + 2 + 10 + 2)
    assert row["bubble_theory"] == pytest.approx(1 - 24 / (2 * 15))


def test_the_bound_is_the_busier_of_worker_and_direction():
    thin, wide = pipeline_row(100.0), pipeline_row(1000.0)
    assert (thin["busiest_compute_ms"], thin["busiest_wire_ms"], thin["bound_ms"]) == (32.0, 80.0, 80.0)
    assert thin["of_bound"] == pytest.approx(0.8)
    assert (wide["busiest_wire_ms"], wide["bound_ms"]) == (8.0, 32.0)
    assert pipeline_row(None)["busiest_wire_ms"] == 0


def test_speed_bytes_and_bubbles():
    row = pipeline_row()
    assert row["samples_per_s"] == pytest.approx(BATCH / 0.1)
    assert (row["wire_bytes"], row["busiest_wire_bytes"]) == (1_500_000, 1_000_000)
    assert row["bubble"] == pytest.approx(1 - 40 / 200)
    assert 0 < row["bubble_theory"] < row["bubble"]
    assert [part["sent_bytes"] for part in row["per_worker"]] == [1_000_000, 500_000]
    assert "reached 80%" in row_line(row)


def test_data_parallel_sends_its_gradients_around():
    row = make_row(settings(), DATA, [measured(), measured()])
    assert row["busiest_wire_bytes"] == 1_000_000
    assert row["bound_ms"] == 80.0
    assert row["bubble"] is None


def test_comparisons_stay_on_one_link_and_one_partition():
    data = make_row(settings(), DATA, [measured(200.0), measured(200.0)])
    plain, other_link = pipeline_row(), pipeline_row(None, 10.0)
    coded = {**pipeline_row(step_ms=25.0), "codec": "sort:6+2"}
    rows = compare([data, plain, coded, other_link])
    assert [row["of_data_parallel"] for row in rows] == [None, pytest.approx(2), pytest.approx(8), None]
    assert [row["of_uncompressed"] for row in rows] == [None, None, pytest.approx(4), None]
    assert {row["of_torch"] for row in rows} == {None}
    tables = result_tables(rows)
    assert len(tables[-1].rows) == 8  # two workers each
    assert {name for row in rows for name in row} - {column.name for column in COLUMNS} == {
        *("samples_ms", "cuts", "per_worker")
    }
    series = plot_speed(rows, "mlp").panels["2 workers"]
    assert series["pipeline none"] == [(100.0, 160.0), (1000.0, 1600.0)]


def test_our_stage_and_torchs():
    """Whose messages nobody times, so that its waiting is not known; older records have no stage, as ours have none."""
    nan = float("nan")
    links = [replace(link(0, 1, 1_000_000 * STEPS), wait_ms=nan, transfer_ms=nan)]
    workers = [measured(200.0, 10.0, links, {0: (1.0, 2.0)}), measured(200.0, 10.0, links, {1: (1.0, 2.0)})]
    run = replace(PIPELINE, layout="linear", stage="torch", link=shaping_of(100.0))
    torchs = make_row(settings(), run, workers)
    assert (torchs["stage"], torchs["encode_ms"], torchs["wait_ms"], torchs["transfer_ms"]) == ("torch", 0, None, None)
    ours = {**pipeline_row(), "layout": "linear"}
    coded = {**ours, "codec": "8bit", "samples_per_s": 320.0}
    rows = compare([torchs, ours, coded])
    assert [row["of_torch"] for row in rows] == [None, pytest.approx(2), pytest.approx(4)]
    assert [row["of_uncompressed"] for row in rows] == [None, None, pytest.approx(2)]
    assert "none, torch's stage" in row_line(torchs)
    assert ours["stage"] is None


def test_quartiles_are_those_of_the_timed_steps_and_of_the_busiest_worker():
    samples = (10.0, 20.0, 30.0, 40.0, 500.0)
    idle = replace(measured(module_ms=5.0), samples_ms=samples, compute_samples_ms=(7.0,) * 5)
    busy = replace(measured(module_ms=8.0), samples_ms=samples, compute_samples_ms=(8.0, 9.0, 10.0, 11.0, 99.0))
    row = make_row(settings(), DATA, [idle, busy])
    assert [row[f"step_{name}ms"] for name in ("p25_", "", "p75_")] == [20.0, 30.0, 40.0]
    assert [row[f"busiest_compute_{name}ms"] for name in ("p25_", "", "p75_")] == [9.0, 10.0, 11.0]
    assert "step 30.0 ms (20.0 to 40.0), bound" in row_line(row)


def test_everything_is_run_with_everything():
    runs = settings().variants()
    places = list(dict.fromkeys((run.workers, run.link) for run in runs))
    assert places == [(1, None), (2, None), (2, shaping_of(100.0))]
    assert [sum((run.workers, run.link) == place for run in runs) for place in places] == [1, 1 + 2**3, 1 + 2**3]
    assert runs[0] == Variant(workers=1, parallel="none")


def test_torchs_stage_sends_no_codecs():
    given = settings(workers=(2,), links=(None,), parallel=("pipeline",), layouts=("linear",), chunks=(2,))
    runs = replace(given, compress=("none", "4bit", "sort:8"), baseline="torch").variants()
    assert [(run.compress, run.stage) for run in runs] == [
        *(("none", "torch"), ("none", None), ("4bit", None), ("sort:6+2", None))
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "vgg"}, "model vgg is no folder here, and as a name of the hub"),
        ({"layouts": ("ring",)}, "layout is linear, client-server, separated by commas; got ring"),
        ({"parallel": ("tensor",)}, "parallel is none, data, pipeline"),
        ({"chunks": (3,)}, "a multiple of 3 chunks, not 16"),
        ({"workers": (3,)}, "a multiple of 3 workers, not 16"),
        ({"workers": (0,)}, "1 or more"),
        ({"workers": (1,), "parallel": ("pipeline",)}, "nothing to measure"),
        ({"compress": ("bogus",)}, "there is no codec 'bogus'"),
        ({"compress": ("5bit",)}, "there is no recipe '5bit'"),
        ({"baseline": "jax"}, "baseline is torch; got jax"),
        ({"steps": 0}, "steps is from 1 to"),
        ({"interleave": 0}, "interleave is from 1 to"),
    ],
    ids=str,
)
def test_options_that_cannot_be_measured(changed, message):
    with pytest.raises(ValueError, match=message):
        settings(links=(None,), **changed).check_here()
