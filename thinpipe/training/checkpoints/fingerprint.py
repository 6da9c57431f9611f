"""What tells one data set from another, so that a run goes on with the samples it began with.

Of both parts: how many samples; what the split says of all of them without reading them (labels; of texts, all tokens;
of pictures in folders, names below the folder and sizes of the files); and a sketch, the mean size of the values of
some samples spread over the part, compared with a tolerance because machines decode and resize a little differently.

So it sees a sample more or less, another order, another label, a changed text, a picture renamed or replaced by one of
another length. Not: a picture replaced by one of the same name and length, unless the sketch looks at it; and of
public pictures, which are not files, only number, labels and sketch. Where the data are does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from xxhash import xxh3_128

from thinpipe.workloads.task import Data, Described, Split

_SKETCHED = 32  # samples of a part
_TOLERANCE = 0.02  # of values that are about 1


def fingerprint(data: Data) -> dict[str, Any]:
    """As JSON."""
    return {"training": _of_split(data.train), "validation": _of_split(data.validation)}


def difference(saved: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """What differs first between two fingerprints, in words."""
    for part, here in found.items():
        there = saved.get(part, {})
        for name in (*here, *(there.keys() - here.keys())):
            if not _alike(there.get(name), here.get(name)):
                if name == "samples":
                    return f"{there.get(name)} {part} samples when it was saved, {here[name]} now"
                return f"the {name} of the {part} samples differ"
    return None


def _of_split(split: Split) -> dict[str, Any]:
    if not len(split):
        return {"samples": 0}
    spread = torch.linspace(0, len(split) - 1, min(len(split), _SKETCHED)).long()
    described = split.describe(torch.arange(len(split))) if isinstance(split, Described) else {}
    batch = split.batch(spread)
    described = described or {"labels": batch.labels.numpy().tobytes()}
    values = batch.inputs[0].float().flatten(1).abs().mean(1)
    return {
        "samples": len(split),
        **{name: xxh3_128(content).hexdigest() for name, content in described.items()},
        "values": [round(value, 4) for value in values.tolist()],
    }


def _alike(saved: Any, found: Any) -> bool:
    if isinstance(saved, list) and isinstance(found, list):
        # NaN is like nothing: what is not finite is compared as text.
        return len(saved) == len(found) and all(
            abs(one - other) <= _TOLERANCE * max(1.0, abs(one)) or repr(one) == repr(other)
            for one, other in zip(saved, found, strict=True)
        )
    return bool(saved == found)
