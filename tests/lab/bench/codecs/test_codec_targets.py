"""Targets of benchmarks/codec_targets.py apply to their own codecs, shapes and machines, and to no others."""

import runpy

import pytest

from tests.scripts import ROOT
from thinpipe.lab.records.record import Record

SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "codec_targets.py"))
SHAPE, GPU_TARGETS = SCRIPT["CPU_SHAPE"], SCRIPT["GPU_TARGETS"]


def row(**changed):
    defaults = {"shape": SHAPE, "content": "relu6", "codec": "sort:6+2", "encode_copies": 5.0, "decode_copies": 2.0}
    defaults |= {"tensor_bytes": 51_380_224, "encode_ms": 10.0}
    return defaults | {"reference_encode_ms": None, "encode_extra_ratio": None} | changed


def targets(*rows, device="cpu", name=""):
    config, environment = {"device": device}, {"devices": [name]}
    record = Record(kind="bench codecs", config=config, columns=(), rows=rows, environment=environment)
    return list(SCRIPT["targets"](record))


def test_each_target_is_held_against_its_worst_row():
    rows = [row(reference_encode_ms=900.0), row(content="laplace", encode_copies=13.0, encode_extra_ratio=0.1)]
    checks = {check.claim: check for check in targets(*rows)}
    measured = {claim.partition(": ")[2]: (check.measured, check.passed) for claim, check in checks.items()}
    assert measured == {
        "encode_copies": (13.0, False),
        "decode_copies": (2.0, True),
        "speed relative to the reference implementation of sort:6+2": (90.0, True),
        "extra memory while encoding": (0.1, True),
    }
    assert not any(check.required for check in checks.values())


def test_too_slow_a_speedup_is_missed():
    missed = [check for check in targets(row(reference_encode_ms=390.0)) if not check.passed]
    assert [check.measured for check in missed] == [39.0]


def test_both_kinds_of_buckets_are_held_against_the_sort():
    rows = [row(reference_encode_ms=900.0), row(codec="fast:6+2", encode_ms=5.0, reference_encode_ms=50.0)]
    assert [check.measured for check in targets(*rows) if "reference" in check.claim] == [90.0, 180.0]


def test_other_shapes_and_codecs_have_no_targets():
    assert targets(row(shape="4x4"), row(codec="sort:3+1")) == []


def test_memory_is_held_against_the_worst_large_tensor():
    large = row(codec="fp16", shape="4x4", encode_extra_ratio=0.5)
    small = row(codec="bf16", encode_extra_ratio=0.9, tensor_bytes=1000)
    (check,) = targets(large, small)
    assert (check.measured, check.passed) == (0.5, False)
    assert check.detail == "fp16, relu6, 4x4"


@pytest.mark.parametrize(("name", "count"), [("NVIDIA H200", 2), ("NVIDIA A100-SXM4-80GB", 0)])
def test_targets_of_one_gpu_are_for_no_other(name, count):
    shape = next(iter(GPU_TARGETS["H200"]))
    rows = [row(codec="tile:8", shape=shape, encode_ms=1.0, decode_ms=1.0)]
    assert len(targets(*rows, device="cuda", name=name)) == count
