"""Targets speak about the rows they are for, and only about those."""

from thinpipe.bench.codecs.targets import SHAPE, check_targets


def row(**figures):
    defaults = {"shape": SHAPE, "content": "relu6", "codec": "sort:6+2", "encode_copies": 5.0, "decode_copies": 2.0}
    defaults |= {"tensor_bytes": 51_380_224, "encode_ms": 10.0}
    return defaults | {"reference_encode_ms": None, "encode_extra_ratio": None} | figures


def test_each_target_is_held_against_its_worst_row():
    rows = [row(reference_encode_ms=900.0), row(content="laplace", encode_copies=13.0, encode_extra_ratio=0.1)]
    checks = {check.claim: check for check in check_targets(rows)}
    measured = {claim.partition(": ")[2]: (check.measured, check.passed) for claim, check in checks.items()}
    assert measured == {
        "encode in copies": (13.0, False),
        "decode in copies": (2.0, True),
        "times the speed of the literal sort:6+2": (90.0, True),
        "encode, extra memory": (0.1, True),
    }
    assert not any(check.required for check in checks.values())


def test_too_slow_a_speedup_is_missed():
    missed = [check for check in check_targets([row(reference_encode_ms=390.0)]) if not check.passed]
    assert [check.measured for check in missed] == [39.0]


def test_both_kinds_of_buckets_are_held_against_the_sort():
    rows = [row(reference_encode_ms=900.0), row(codec="fast:6+2", encode_ms=5.0, reference_encode_ms=50.0)]
    speedups = [check.measured for check in check_targets(rows) if "literal" in check.claim]
    assert speedups == [90.0, 180.0]


def test_other_shapes_and_codecs_have_no_targets():
    assert list(check_targets([row(shape="4x4"), row(codec="sort:3+1")])) == []


def test_memory_is_held_against_the_worst_large_tensor():
    large = row(codec="fp16", shape="4x4", encode_extra_ratio=0.5)
    small = row(codec="bf16", encode_extra_ratio=0.9, tensor_bytes=1000)
    (check,) = check_targets([large, small])
    assert (check.measured, check.passed) == (0.5, False)
    assert check.detail == "fp16, relu6, 4x4"
