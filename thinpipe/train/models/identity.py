"""What tells one model's folder from another's, wherever it is: its description, and a sketch of its weights.

The sketch has name, type, shape and first values of every tensor, so it sees another model and other fine-tuned
weights, whatever files they are in, and reads a few kilobytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from thinpipe.system.files import read_json
from thinpipe.train.models.weights import weight_files

_SKETCHED = 8  # values of a tensor
_UNRELATED = ("_name_or_path", "transformers_version")  # of a description: who wrote it, and where


def folder_identity(folder: Path, *, weights: bool) -> dict[str, str]:
    """Return a hash of each part of a model; ValueError for one that cannot be read.

    Parts that are not there are left out, but for weights in files other than safetensors, which are none.
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
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, it is no dict
                    tensor = file.get_slice(name)
                    shape = tensor.get_shape()
                    line = f"{name} {tensor.get_dtype()} {shape}".encode()
                    if shape and all(shape):
                        first = tensor[(*[slice(0, 1)] * (len(shape) - 1), slice(0, _SKETCHED))]
                        line += first.contiguous().view(torch.uint8).numpy().tobytes()
                    lines.append(line)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
    return _short(b"\n".join(sorted(lines)))


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
