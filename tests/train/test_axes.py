"""axes:B in training: every byte is planned, and the model learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.train.toy import Recorder, train_toy
from thinpipe import codec
from thinpipe.links.learned.learner import LEAD, is_due
from thinpipe.links.learned.row_layout import rows_of
from thinpipe.links.message import CHECKSUM_BYTES
from thinpipe.train.running import RunOptions

CHUNKS, EPOCHS, STEPS = 3, 6, 24
SHAPE = (6, 256)


def counted(group: Any, given: dict[str, Any]) -> tuple[Recorder, int]:
    """A run, and the bytes of all messages of links that this worker handed to the network."""
    sent, isend = 0, dist.isend

    def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        if kwargs["tag"] >= 1 << 30 and len(tensor) > 1:  # a byte: a step that was expected does not come
            sent += tensor.numel() * tensor.element_size()
        return isend(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", count)
        return train_toy(group, "plain", RunOptions(), given), sent


def test_bytes_follow_from_shapes_and_steps(pool: Pool) -> None:
    given = {"compress_forward": "axes:2+now", "compress_backward": "none", "epochs": EPOCHS}
    results = pool.run(counted, 2, given)
    recorder = results[0][0]
    rows = rows_of(SHAPE, 2, CHUNKS)
    assert rows is not None
    first, again = codec("tile:8").wire_bytes(SHAPE, torch.float32), rows.wire_bytes(2)
    part = -(-rows.basis_bytes // CHUNKS)
    carries = [is_due(step - LEAD, rows, 2, CHUNKS, 0) for step in range(STEPS)]
    known = [any(carries[:step]) for step in range(STEPS)]
    assert {(False, False), (False, True), (True, False), (True, True)} == set(zip(known, carries, strict=True))
    messages = [
        (again if after else first) + (part if more else 0) + CHECKSUM_BYTES
        for after, more in zip(known, carries, strict=True)
    ]
    gradients = 2 * CHUNKS * (SHAPE[0] * SHAPE[1] * 4 + CHECKSUM_BYTES)
    assert [step.wire_bytes - gradients for step in recorder.steps] == [2 * CHUNKS * each for each in messages]
    forward = [link for link in recorder.end.links if link.direction == "forward"]
    assert [link.wire_bytes for link in forward] == [CHUNKS * sum(messages)] * 2
    evaluations = sum(sent for _, sent in results) - sum(step.wire_bytes for step in recorder.steps)
    batches = [2 * 2 * CHUNKS * (each + CHECKSUM_BYTES) for each in (first, *[again] * (EPOCHS - 1))]  # of 23 samples
    assert evaluations == sum(batches)
    planned = [link for link in recorder.plan.links if link.direction == "forward"]
    learned = -(-CHUNKS * part // rows.every(2, CHUNKS))
    for link in planned:
        assert link.learned_bytes == learned
        assert link.first_wire_bytes == CHUNKS * (first + CHECKSUM_BYTES)
        assert link.wire_bytes == CHUNKS * (again + CHECKSUM_BYTES) + learned
    assert recorder.steps[-1].loss < 0.5 * recorder.steps[0].loss
