"""Plans become runs: every combination, each with all that its outcome depends on; what makes no sense is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.ablation.helpers import make_plan, write_plan
from thinpipe.cli.ablate import resolve
from thinpipe.codecs.recipes import RECIPES
from thinpipe.lab.ablation.plan import identity, read_plan
from thinpipe.train.settings import Settings

PLANS = Path(__file__).parents[3] / "ablations"


def test_every_combination_is_a_run_and_the_last_line_varies_fastest(tmp_path: Path) -> None:
    plan = make_plan(
        tmp_path, 'task = ["digits", "grammar"]\ncompress = ["none", "sort:8"]\nseed = [0, 1]', "epochs = 2"
    )
    assert [run.name for run in plan.runs] == [
        f"{task} {codec} seed {seed}"
        for task in ("digits", "grammar")
        for codec in ("none", "sort:6+2")
        for seed in (0, 1)
    ]
    arguments = ["--epochs", "2", "--task", "digits", "--seed", "0", "--compress", "sort:6+2"]
    assert plan.runs[2].arguments() == arguments


def test_a_spec_may_list_arguments_and_directions_may_differ(tmp_path: Path) -> None:
    codecs = '["fp16", "sort:4,2+2", { forward = "kmeans:4,2", backward = "sort:8" }]'
    plan = make_plan(tmp_path, f"compress = {codecs}")
    assert [run.codec for run in plan.runs] == [
        "fp16",
        "sort:3+1",
        "sort:2+2",
        "kmeans:4/sort:6+2",
        "kmeans:2/sort:6+2",
    ]
    assert plan.runs[-1].arguments()[-4:] == ["--compress-forward", "kmeans:2", "--compress-backward", "sort:6+2"]


def test_other_options_that_vary_are_part_of_the_name(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, 'chunks = [2, 4]\nclient-layers = ["1,1", "2,1"]\nseed = [0]')
    assert plan.runs[1].name == "digits 8bit chunks 2 client-layers 2,1 seed 0"
    assert plan.runs[1].settings["client_layers"] == [2, 1]
    assert plan.runs[1].varied == {"chunks": 2, "client-layers": "2,1"}


def test_the_preset_is_part_of_the_identity_of_a_run(tmp_path: Path) -> None:
    said = make_plan(tmp_path, "seed = [0]", 'task = "digits"\nepochs = 10').runs[0]
    left_out = make_plan(tmp_path, "seed = [0]").runs[0]
    other = make_plan(tmp_path, "seed = [0]", 'task = "digits"\nepochs = 11').runs[0]
    threads = make_plan(tmp_path, "seed = [0]", 'task = "digits"\nthreads = 1').runs[0]
    assert said.identity == left_out.identity == threads.identity
    assert said.identity != other.identity


def test_a_run_is_the_same_wherever_its_model_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = set()
    for place in ("here", "there"):
        (tmp_path / place / "base").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / place)
        plan = make_plan(tmp_path, "seed = [0]", 'task = "lm"\nmodel = "base"\ndata = "texts"')
        identities.add(plan.runs[0].identity)
    assert len(identities) == 1


def test_aliases_are_the_options_that_they_name(tmp_path: Path) -> None:
    usual = make_plan(tmp_path, "chunks = [2, 4]", "lr = 0.5\nrecompute = true").runs
    aliased = make_plan(tmp_path, "microbatches = [2, 4]", "learning-rate = 0.5\ngradient-checkpointing = true").runs
    assert usual == aliased
    (run,) = make_plan(tmp_path, "seed = [0]", "learning-rate = 0.5", "lr=0.25").runs
    assert run.settings["lr"] == 0.25
    with pytest.raises(ValueError, match=r"\[train\]: .*lr and .*learning.rate are the same option: give one of them"):
        make_plan(tmp_path, "seed = [0]", "lr = 0.5\nlearning-rate = 0.5")
    with pytest.raises(ValueError, match=r"chunks is in \[train\].* and in \[matrix\]"):
        make_plan(tmp_path, "microbatches = [2, 4]", "chunks = 2")


def test_a_result_with_the_old_name_of_a_value_is_of_the_same_run(tmp_path: Path) -> None:
    (run,) = make_plan(tmp_path, "seed = [0]", 'lr-schedule = "polynomial"').runs
    assert run.settings["lr_schedule"] == "linear"
    assert identity({**run.settings, "lr_schedule": "polynomial"}) == run.identity


def test_overrides_go_before_the_file(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "seed = [0, 1, 2]", "epochs = 5", "epochs=2", "seed=7", "compress=kmeans:4", "steps=3")
    (run,) = plan.runs
    assert (run.settings["epochs"], run.settings["seed"], run.settings["steps"]) == (2, 7, 3)
    assert run.codec == "kmeans:4"


def test_a_run_is_found_by_part_of_its_name_and_by_a_codec_in_short(tmp_path: Path) -> None:
    run = make_plan(tmp_path, 'compress = ["sort:8"]\nseed = [2]').runs[0]
    assert run.matches("seed 2")
    assert run.matches("sort:8")
    assert run.matches("sort:8 seed 2")
    assert run.matches("sort")
    assert not run.matches("sort:4")


@pytest.mark.parametrize(
    ("train", "matrix", "message"),
    [
        ("epoch = 2", "seed = [0]", r"\[train\] has no epoch; there is: .*epochs"),
        ("", "seeds = [0]", r"\[matrix\] has no seeds; there is: .*seed"),
        ("", "seed = 0", "a list of values"),
        ("", "seed = []", "a list of values"),
        ("seed = 1", "seed = [0]", "leave it in one of them"),
        ('epochs = "two"', "seed = [0]", "epochs is an integer, got 'two'"),
        ("epochs = true", "seed = [0]", "epochs is an integer, got True"),
        ("layout = 2", "seed = [0]", "layout is a text, got 2"),
        ('lr = "fast"', "seed = [0]", "lr is a number"),
        ("", 'compress = ["zip:9"]', "there is no codec 'zip'"),
        ("", "compress = [8]", 'as in "sort:8"'),
        ("", 'compress = [{ forward = "none" }]', "backward"),
        ("", 'compress = ["sort:8", "sort:6+2"]', "two runs are the same"),
        ("batch-size = 10", "seed = [0]", "not a multiple of"),
        ('task = "poetry"', "seed = [0]", "there is no task 'poetry'"),
        ("lr = inf", "seed = [0]", "the run with seed 0: lr is above 0"),
        ("", "lr = [0.1, nan]", "the run with lr nan: lr is above 0"),
        ("epochs =", "", "cannot be read as a plan, a TOML file"),
    ],
)
def test_invalid_entries_are_named(tmp_path: Path, train: str, matrix: str, message: str) -> None:
    path = write_plan(tmp_path, matrix, train)
    with pytest.raises(ValueError, match=message) as error:
        read_plan(path, resolve)
    assert str(error.value).startswith(str(path))


def test_more_runs_than_anybody_waits_for_are_counted_not_made(tmp_path: Path) -> None:
    def never(options: dict[str, object]) -> Settings:
        raise AssertionError("a run was made")

    matrix = f"seed = {list(range(300))}\nepochs = {list(range(1, 101))}\nchunks = {list(range(1, 101))}"
    path = write_plan(tmp_path, matrix)
    with pytest.raises(ValueError, match="makes 3,000,000: 300 seed x 100 epochs x 100 chunks"):
        read_plan(path, never)


FEW_BITS = {"few_bits_digits": "digits", "few_bits_grammar": "grammar", "few_bits_hard": "digits"}
DDP = "ddp"
TEXT = ("lm",)
SMALL = {
    "lm_small": {*RECIPES, "tile:5/gauss:3+unbiased"},
    "lm_small_lora": {*RECIPES},
}
ON_A_GPU = (
    *TEXT,
    "lm_codecs",
    "fashion_mnist",
    "fashion_mnist_seeds",
    "lm_documents",
    "lm_scratch",
    "lm_scratch_seeds",
    "lm_scratch_32_seeds",
)
OF_THEIR_OWN = {*FEW_BITS, DDP, *SMALL, *ON_A_GPU}  # a test each, or one for some


@pytest.mark.parametrize("name", FEW_BITS)
def test_plans_of_few_bits_hold_the_recipes_against_the_older_codecs(name: str) -> None:
    plan = read_plan(PLANS / f"{name}.toml", resolve)
    assert {run.settings["task"] for run in plan.runs} == {FEW_BITS[name]}
    assert {run.settings["seed"] for run in plan.runs} == {0, 1, 2, 3, 4}
    assert {"none", *RECIPES, "uniform:4", "sort:3+1", "kmeans:2"} <= {run.codec for run in plan.runs}


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PLANS.glob("*.toml")) if path.stem not in OF_THEIR_OWN],
    ids=lambda path: path.stem,
)
def test_shipped_plans_are_valid_for_train(path: Path) -> None:
    plan = read_plan(path, resolve)
    assert {run.settings["task"] for run in plan.runs} == {path.stem}
    assert {run.settings["seed"] for run in plan.runs} == {0, 1, 2}
    assert "none" in {run.codec for run in plan.runs}  # what the others are held against
    assert {"sort:12+4", "sort:9+3", "sort:6+2"} <= {run.codec for run in plan.runs}


def test_all_the_plans_that_there_should_be_are_shipped() -> None:
    assert {path.stem for path in PLANS.glob("*.toml")} == {
        "cifar10",
        "cola",
        *OF_THEIR_OWN,
    }


@pytest.mark.parametrize("name", ON_A_GPU)
def test_plans_for_a_gpu_are_read_without_one(name: str) -> None:
    """So that their tables can be made from results that another machine has left."""
    runs = read_plan(PLANS / f"{name}.toml", resolve).runs
    assert {run.settings["device"] for run in runs} == {"cuda"}
    assert "none" in {run.codec for run in runs}


@pytest.mark.parametrize("name", TEXT)
def test_plans_of_language_models_hold_the_recipes_against_none_in_one_process(name: str) -> None:
    runs = read_plan(PLANS / f"{name}.toml", resolve).runs
    assert {run.settings["seed"] for run in runs} == {0, 1, 2}
    assert {"none", *RECIPES} <= {run.codec for run in runs}
    assert all(run.options["in-process"] and "--in-process" in run.arguments() for run in runs)
    assert {run.settings["lora"] for run in runs} == {None}


@pytest.mark.parametrize("name", SMALL)
def test_plans_of_small_language_models_run_on_a_cpu(name: str) -> None:
    runs = read_plan(PLANS / f"{name}.toml", resolve).runs
    assert {run.settings["seed"] for run in runs} == {0, 1, 2}
    assert {run.settings["device"] for run in runs} == {"cpu"}
    assert {run.settings["lora"] for run in runs} == {8 if name.endswith("lora") else None}
    assert {run.codec for run in runs} == {"none", *SMALL[name]}


def test_the_plan_of_replicas_has_a_second_question() -> None:
    """With error feedback and, with ``--set``, without: other runs, so that both may share a file of results."""
    runs = read_plan(PLANS / "ddp.toml", resolve).runs
    assert {run.settings["parallel"] for run in runs} == {"data"}
    assert {run.codec for run in runs} == {"none", "uniform:8", "uniform:4", "uniform:2", "power:4", "topk:0.01"}
    assert not any("error-feedback" in word for run in runs for word in run.arguments())
    without = read_plan(PLANS / "ddp.toml", resolve, ["error-feedback=false"]).runs
    assert all("--no-error-feedback" in run.arguments() for run in without)
    assert not {run.identity for run in runs} & {run.identity for run in without}
