"""Impossible measurements are rejected before any replica starts."""

import sys
from dataclasses import replace

import pytest
import torch

from thinpipe.lab.bench import models
from thinpipe.lab.bench.ddp.ddp_options import DDPBenchOptions
from thinpipe.lab.bench.models import Shapes, build, check_model

SETTINGS = DDPBenchOptions(
    models=("mobilenetv2",),
    batch_size=2,
    image_size=32,
    tokens=8,
    dtype="float32",
    device="cpu",
    backend=None,
    link=None,
    bucket_cap_mb=25,
    static_graph=False,
    gradient_as_bucket_view=False,
    compress=None,
    hook=None,
    warmup=1,
    iterations=1,
)


@pytest.fixture(autouse=True)
def _no_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # importing it is an ImportError, installed or not


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("resnet18",)}, "model is one of resnet50, .* got 'resnet18'"),
        ({"models": ("resnext50_32x4d",)}, "pip install torchvision"),
        ({"models": ("nowhere:model",)}, "cannot be imported: No module named 'nowhere'"),
        ({"models": ("math:nothing",)}, "cannot be imported: module 'math' has no attribute 'nothing'"),
        ({"models": ("math:pi",)}, "is no function"),
        ({"compress": "uniform:8", "hook": "fp16"}, "through one hook"),
        ({"compress": "uniform:99"}, "'uniform:99' makes no sense"),
        ({"device": "cuda"}, "device is auto, cpu, or cuda"),
        ({"backend": "nccl"}, "joins GPUs"),
        ({"hook": "bf16"}, "compress bf16 runs everywhere"),
        ({"hook": "powersgd", "warmup": 2}, "skip_steps 3 or more, not 2"),
        ({"bucket_cap_mb": 1e7}, "bucket_cap_mb is above 0 and at most 1e"),
    ],
    ids=lambda value: ",".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_refused(changes, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if changes.get("device") == "cuda" and torch.cuda.device_count():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match=message) as error:
        replace(SETTINGS, **changes).check_here()
    assert "\n" not in str(error.value)


def test_accepted():
    for changes in ({}, {"compress": "power:4"}, {"hook": "powersgd", "warmup": 3}, {"backend": "gloo"}):
        replace(SETTINGS, **changes).check_here()


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "mobilenetv2", "roberta-base"])
def test_every_model_comes_from_transformers_without_torchvision(name):
    assert check_model(name).startswith("transformers ")


@pytest.mark.parametrize(("name", "parameters"), [("resnet50", 25_557_032), ("mobilenetv2", 3_504_872)])
def test_models_are_those_of_the_papers_and_learn(name, parameters):
    work = build(name, Shapes(batch_size=2, image_size=32, tokens=8), dtype=torch.float32, device=torch.device("cpu"))
    assert sum(p.numel() for p in work.model.parameters()) == parameters
    work.loss(work.model(*work.inputs)).backward()
    assert all(p.grad is not None for p in work.model.parameters())


def test_torchvision_is_preferred_if_it_imports(monkeypatch):
    monkeypatch.setattr(models, "has_torchvision", lambda: True)
    monkeypatch.setattr(models, "version", lambda library: "1.0")
    assert check_model("resnext101_32x8d") == check_model("resnet50") == "torchvision 1.0"
    assert check_model("roberta-base") == "transformers 1.0"
