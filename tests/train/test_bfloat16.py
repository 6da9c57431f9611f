"""Weights in bfloat16, updated through float32 copies: they learn what float32 learns, are saved and go home."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.pool import Pool
from tests.train.tasks.written import write_image_classifier, write_language_model, write_picture
from tests.train.toy import Recorder, run_toy, settings_for
from thinpipe.train import optimize
from thinpipe.train.checkpoints.folder import load, newest
from thinpipe.train.optimize import MasterWeights, load_state_for, make_optimizer, state_for
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.tasks import task

TEXT = "weights of half the size take half the room, and what is added to them is often too small to be seen. " * 30


def optimizer_of(parameters: list[nn.Parameter], name: Any) -> torch.optim.Optimizer:
    return make_optimizer(parameters, optimizer=name, lr=1e-3, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_updates_too_small_for_bfloat16_add_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are what float32 would be, to the bit; updates of bfloat16 itself never move it."""
    monkeypatch.setattr(optimize, "PORTION", 50)  # some of them at a time
    shapes = [(8, 8), (3,), (40,), (2, 30)]
    narrow = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
    wide = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    plain = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
    optimizers = [optimizer_of(narrow, name), optimizer_of(wide, name), torch.optim.SGD(plain, lr=1e-3)]
    assert isinstance(optimizers[0], MasterWeights)
    for _ in range(30):
        for parameter in (*narrow, *wide, *plain):
            parameter.grad = torch.full_like(parameter, 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for few, many, stuck in zip(narrow, wide, plain, strict=True):
        assert few.dtype == torch.bfloat16
        kept = state_for(optimizers[0], few)
        assert torch.equal(kept["master"], many)
        assert torch.equal(few, many.bfloat16())
        assert float(few.detach().float().mean()) < 0.99
        assert torch.equal(stuck, torch.ones_like(stuck)), "a step of 0.0005 from 1 is lost in bfloat16"
        assert all(value.dtype == torch.float32 for value in kept.values() if isinstance(value, torch.Tensor))


def test_optimizer_state_can_be_loaded() -> None:
    first, second = ([nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))] for _ in range(2))
    frozen = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    before, after = optimizer_of([*first, frozen], "adamw"), optimizer_of(second, "adamw")
    assert state_for(before, frozen) == {}

    def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        parameters[0].grad = torch.full((4, 4), 0.5, dtype=torch.bfloat16)
        optimizer.step()

    step(first, before)
    for what, value in state_for(before, first[0]).items():
        load_state_for(after, second[0], what, value.clone())
    step(first, before)
    step(second, after)
    assert torch.equal(state_for(before, first[0])["master"], state_for(after, second[0])["master"])


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("language")
    write_language_model(folder / "model", TEXT)
    (folder / "text.txt").write_text(TEXT)
    given = {"model": str(folder / "model"), "data": str(folder / "text.txt"), "tokens": 16, "batch_size": 8}
    return given | {"chunks": 2, "compress": "none", "lr": 1e-2, "epochs": 2}


def run_lm(group: Any, running: RunOptions, given: dict[str, Any]) -> Recorder:
    return run_toy(group, task("lm"), running, **given)


def test_a_pipeline_trains_like_float32_resumes_and_exports(
    pool: Pool, tmp_path: Path, language: dict[str, Any]
) -> None:
    half = language | {"dtype": "bfloat16"}
    wide = pool.run(run_lm, 2, RunOptions(), language)[0]
    running = RunOptions(save=tmp_path / "run", export=tmp_path / "tuned")
    narrow = pool.run(run_lm, 2, running, half)[0]
    assert narrow.end.validation_loss == pytest.approx(wide.end.validation_loss, rel=0.03)
    assert narrow.end.validation_loss < 0.9 * wide.steps[0].loss
    sizes = [sum(link.tensor_bytes for link in recorder.plan.links) for recorder in (narrow, wide)]
    assert 2 * sizes[0] == sizes[1]

    saved = load(newest(tmp_path / "run"), lambda key: True)
    models = {name.removeprefix("model/"): each for name, each in saved.items() if name.startswith("model/")}
    for name, each in models.items():
        if f"optimizer/{name}/master" in saved:
            assert torch.equal(saved[f"optimizer/{name}/master"].bfloat16(), each)
            assert saved[f"optimizer/{name}/exp_avg"].dtype == torch.float32
    assert sum(name.endswith("/master") for name in saved) > 10
    exported = load_file(tmp_path / "tuned" / "model.safetensors")
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {each.dtype for each in exported.values()} == {torch.bfloat16}
    assert all(torch.equal(each, models[name]) for name, each in exported.items())

    steps = narrow.end.steps // 2
    pool.run(run_lm, 2, RunOptions(save=tmp_path / "half", steps=steps), half)
    rest = pool.run(run_lm, 2, RunOptions(resume=tmp_path / "half"), half)[0]
    assert rest.end.steps == narrow.end.steps - steps
    assert rest.end.parameters_sha256 == narrow.end.parameters_sha256


@pytest.mark.parametrize("compress", ["none", "uniform:8"])
def test_replicas_average_gradients_of_bfloat16(pool: Pool, language: dict[str, Any], compress: str) -> None:
    given = language | {"dtype": "bfloat16", "chunks": 1, "parallel": "data", "compress": compress}
    alone = run_lm(None, RunOptions(), given | {"parallel": "none", "compress": "none"})
    recorder = pool.run(run_lm, 2, RunOptions(), given)[0]
    assert recorder.end.validation_loss == pytest.approx(alone.end.validation_loss, rel=0.03)


def test_images_reach_the_model_in_its_type(pool: Pool, tmp_path: Path) -> None:
    for number in range(20):
        write_picture(tmp_path / "data" / ("cats" if number % 2 else "dogs") / f"{number}.png", seed=number)
    model = write_image_classifier(tmp_path / "model", "resnet")
    given = {"data": str(tmp_path / "data"), "model": str(model), "dtype": "bfloat16", "image_size": 64}
    recorder = pool.run(run_images, 2, given | {"batch_size": 8, "epochs": 1})[0]
    assert recorder.end.steps == 2


def run_images(group: Any, given: dict[str, Any]) -> Recorder:
    return run_toy(group, task("images"), RunOptions(), **given)


def load_with(name: str, given: dict[str, Any]) -> None:
    found = settings_for(task(name), None, **given).source
    task(name).preflight(found)
    task(name).load(found)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("lm", {"amp": True}, "give one of them"),
        ("lm", {"model": "package.module:function"}, "makes its own weights"),
        ("lm", {"model": None, "config": "xlnet"}, "does not go with dtype bfloat16"),
        ("digits", {"model": None, "data": None, "tokens": None}, "and not dtype"),
    ],
)
def test_unsupported_dtypes_are_one_line(
    language: dict[str, Any], name: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_with(name, {**language, "dtype": "bfloat16", "parallel": "none", **given})
    assert len(str(error.value).splitlines()) == 1
