"""The identity of a model's folder, wherever it is: hashes of its config and of a sketch of its weights.

The sketch has name, type, shape and first values of every tensor. It differs for another model and for other fine-tuned
weights, does not depend on how they are split into files, and needs only a few kilobytes of reads.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from thinpipe.system.files import read_json
from thinpipe.train.models.weights import open_tensors, weight_files

_SKETCHED = 8  # values per tensor
_UNRELATED = ("_name_or_path", "transformers_version")  # fields of a config that only record its origin


def folder_identity(folder: Path, *, weights: bool) -> dict[str, str]:
    """Return a hash of each part of a model; raise ValueError for one that cannot be read.

    Missing parts are left out, except that weights in other formats than safetensors are rejected.
    """
    found, described = {}, folder / "config.json"
    if described.is_file():
        facts = read_json(described, "the description of a model")
        if isinstance(facts, dict):
            facts = {name: value for name, value in facts.items() if name not in _UNRELATED}
        found[described.name] = _short(json.dumps(facts, sort_keys=True).encode())
    if weights:
        found["weights"] = _sketch(folder)
    return found


def _sketch(folder: Path) -> str:
    lines = []
    for path in weight_files(folder):
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                tensor = file.get_slice(name)
                shape = tensor.get_shape()
                line = f"{name} {tensor.get_dtype()} {shape}".encode()
                if shape and all(shape):
                    first = tensor[(*[slice(0, 1)] * (len(shape) - 1), slice(0, _SKETCHED))]
                    line += first.contiguous().view(torch.uint8).numpy().tobytes()
                lines.append(line)
    return _short(b"\n".join(sorted(lines)))


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
