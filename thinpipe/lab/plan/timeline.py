"""The timeline of a predicted step, as bars for ``pipeline.trace.draw``."""

from __future__ import annotations

from collections.abc import Iterator

from thinpipe.lab.plan.predictor import Prediction, Predictor
from thinpipe.pipeline.trace import Bar
from thinpipe.train.engines.simulator import Simulated

_KINDS = {"F": "forward", "B": "backward"}


def bars_of(predictor: Predictor, prediction: Prediction) -> list[Bar]:
    """Return the bars of a prediction whose simulation was recorded."""
    bars = list(_bars(predictor, prediction))
    origin = min(bar.start_ms for bar in bars)
    return [
        Bar(bar.worker, bar.kind, bar.stage, bar.chunk, bar.start_ms - origin, bar.end_ms - origin)
        for bar in sorted(bars, key=lambda bar: (bar.worker, bar.start_ms))
    ]


def _bars(predictor: Predictor, prediction: Prediction) -> Iterator[Bar]:
    simulated: Simulated = prediction.details
    costs = predictor.costs(prediction.candidate)
    sent = {}
    for each in simulated.intervals:
        stage, kind, chunk = each.action
        cost = costs[stage, kind]
        decoded, computed = each.began + cost.decode_ms, each.ended - cost.encode_ms
        if cost.decode_ms:
            yield Bar(each.worker, "decode", stage, chunk, each.began, decoded)
        yield Bar(each.worker, _KINDS[kind], stage, chunk, decoded, computed)
        if cost.encode_ms:
            yield Bar(each.worker, "encode", stage, chunk, computed, each.ended)
        sent[each.action] = each.ended
    for each in simulated.intervals:
        stage, kind, chunk = each.action
        if each.arrived is not None:
            source = each.action._replace(stage=stage - 1 if kind == "F" else stage + 1)
            yield Bar(each.worker, f"{_KINDS[kind]} transfer", stage, chunk, sent[source], each.arrived)
