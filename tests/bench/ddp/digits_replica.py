"""What one replica does in the test of the digits."""

from __future__ import annotations

from typing import Any

from thinpipe.bench.ddp.digits import Recipe, compare_accuracy
from thinpipe.measure.record import Record


def compare_on_replica(group: Any, codecs: tuple[str, ...]) -> Record | None:
    return compare_accuracy(Recipe(codecs=codecs, seeds=1, epochs=5, batch_size=64), ["thinpipe"])
