"""Captured tensors of a link become one row; others stay as they are."""

import pytest

from thinpipe.lab.bench.codecs.codec_columns import Losses
from thinpipe.lab.bench.codecs.codec_tables import mean_over_steps
from thinpipe.lab.records.record import columns_of


def row(content, error, shape="4x4", codec="sort:6+2", **figures):
    nothing = {column.name: None for column in columns_of(Losses)}
    return nothing | {"shape": shape, "content": content, "codec": codec, "relative_error": error} | figures


def test_steps_and_chunks_of_a_link_become_their_mean():
    rows = [
        row("forward/0-1/0/step000003/chunk0", 0.01, bias=1.0, zero_error=None, zero_fraction=0.0),
        row("forward/0-1/0/step000003/chunk1", 0.03, bias=-2.0, zero_error=0.5, zero_fraction=0.5),
        row("backward/1-0/0/step000003/chunk0", 0.5),
    ]
    forward, backward = mean_over_steps(rows)
    assert (forward["content"], backward["content"]) == ("forward/0-1", "backward/1-0")
    assert forward["relative_error"] == pytest.approx(0.02)
    assert forward["snr_db"] == pytest.approx(16.99, abs=0.01)
    assert (forward["bias"], forward["zero_error"], forward["zero_fraction"]) == (-0.5, 0.5, 0.25)
    assert backward["bias"] is None


def test_shapes_and_codecs_stay_apart():
    name = "forward/0-1/0/step000003/chunk0"
    rows = [row(name, 0.01), row(name, 0.01, shape="9"), row(name, 0.01, codec="none")]
    assert len(mean_over_steps(rows)) == 3


def test_other_names_stay_as_they_are():
    rows = [row("forward", 0.1), row("layer.0/forward/0-1/x", 0.2), row("relu6", 0.3, snr_db=5.228787452803376)]
    assert [(one["content"], one["relative_error"]) for one in mean_over_steps(rows)] == [
        ("forward", 0.1),
        ("layer.0/forward/0-1/x", 0.2),
        ("relu6", 0.3),
    ]
