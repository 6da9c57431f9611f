"""The manifest of a checkpoint: a JSON file that is written last and contains a hash of its contents."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128

from thinpipe.options import from_facts
from thinpipe.system.files import TEXT_BYTES, regular_size, replace_file
from thinpipe.train.checkpoints.part import DamagedError, Part
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.task import METRICS, Metric
from thinpipe.version import __version__

FORMAT = 2  # of the manifest, of the parts and of the names of tensors
NAME = "manifest.json"
_SEAL = "xxh3_128"  # hash of all other entries
_KEYS = ("format", "thinpipe", "torch", "settings", "habits", "progress", "first_units", "data", "parts")


class ForeignError(ValueError):
    """A checkpoint that another version of thinpipe wrote and this one cannot read."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options for saving a run, which stay in effect when it resumes unless the user gives others."""

    save_every: int | str | None = None  # steps, or a time as the user wrote it
    keep: int = 2
    save_local: bool = False
    keep_best: bool = False


@dataclass(kw_only=True)
class Progress:
    """The progress of a run, valid on the client: counters and metrics that continue when the run resumes."""

    step: int = 0  # completed
    steps: int = 0  # of the full run
    epoch_loss: float = 0.0  # sum over the samples of the current epoch
    epoch_correct: float = 0.0
    epoch_samples: int = 0
    train_loss: float = float("nan")  # of the last evaluation, as are the next two
    validation_loss: float = float("nan")
    metric: float = float("nan")
    best_metric: float = float("-inf")  # not finite: nothing evaluated yet
    best: tuple[int, float] | None = None  # step and metric of the best checkpoint, if there is one
    metric_name: Metric = "accuracy"
    bits_per_byte: float | None = None  # of texts
    evaluations_without_best: int = 0  # since the best metric, for early stopping
    wire_bytes: int = 0  # sent by all workers in training
    parameters_sha256: str = ""  # set with the last checkpoint
    levels: tuple[int, ...] = ()  # bits per value of the links where they are chosen in training

    @property
    def is_complete(self) -> bool:
        return self.step >= self.steps

    def count(self, *, loss: float, correct: float, samples: int, wire_bytes: int) -> None:
        self.step += 1
        self.wire_bytes += wire_bytes
        self.epoch_loss += loss * samples
        self.epoch_correct += correct
        self.epoch_samples += samples

    def evaluated(self, *, validation_loss: float, metric: float, bits_per_byte: float | None = None) -> None:
        self.train_loss = self.epoch_loss / max(self.epoch_samples, 1)
        self.validation_loss, self.metric, self.bits_per_byte = validation_loss, metric, bits_per_byte
        is_first, before = not math.isfinite(self.best_metric), self.best_metric
        self.best_metric = metric if is_first else METRICS[self.metric_name].best(self.best_metric, metric)
        is_better = math.isfinite(metric) and (is_first or self.best_metric != before)
        self.evaluations_without_best = 0 if is_better else self.evaluations_without_best + 1

    def stops_early(self, evaluations: int | None) -> bool:
        """Return True if this many evaluations had no better metric than one before; None: never."""
        return evaluations is not None and self.evaluations_without_best >= evaluations

    def begin_epoch(self) -> None:
        self.epoch_loss, self.epoch_correct, self.epoch_samples = 0.0, 0.0, 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything in a checkpoint except the tensors."""

    settings: Settings
    options: SaveOptions
    progress: Progress
    first_units: tuple[int, ...]  # of each stage: where the model was cut
    data: Mapping[str, Any]  # the fingerprint of the samples
    parts: tuple[Part, ...]
    thinpipe: str = __version__
    torch: str = str(torch.__version__)

    def write(self, directory: Path) -> None:
        facts = {
            "format": FORMAT,
            "thinpipe": self.thinpipe,
            "torch": self.torch,
            "settings": self.settings.to_json(),
            "habits": asdict(self.options),
            "progress": asdict(self.progress),
            "first_units": list(self.first_units),
            "data": self.data,
            "parts": [asdict(part) for part in self.parts],
        }
        with replace_file(directory / NAME) as temporary:
            temporary.write_text(json.dumps(facts | {_SEAL: seal(facts)}, indent=2))

    def versions(self) -> str | None:
        """Return a line about the versions that saved the checkpoint, or None if they are the current ones."""
        if (self.thinpipe, self.torch) == (__version__, str(torch.__version__)):
            return None
        return (
            f"saved by thinpipe {self.thinpipe} with torch {self.torch}, goes on with {__version__} and "
            f"{torch.__version__}: results may not be bit-identical"
        )


def seal(facts: Mapping[str, Any]) -> str:
    """Return the hash of a manifest's contents, independent of its formatting."""
    return xxh3_128(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint; raise DamagedError if it was changed, ForeignError for other versions."""
    return manifest_of(read_facts(path), path)


def read_facts(path: Path) -> dict[str, Any]:
    """Return the manifest as JSON, after checking its format and hash."""
    facts = _parse(path / NAME)
    number = facts.get("format")
    if type(number) is not int or number < 1:
        raise DamagedError(f"{NAME}: its format should be {FORMAT}, got {json.dumps(number)[:40]}")
    if number == 1:
        raise ForeignError(
            f"{path} is in format 1, which is made of pickles, and this version reads none: finish that run with "
            "thinpipe 0.1.0, which reads it, or start a new one"
        )
    if number > FORMAT:
        raise ForeignError(
            f"{path} was saved by thinpipe {facts.get('thinpipe')} in format {number}, this version reads {FORMAT}; "
            "resume with the version that saved it"
        )
    saved = facts.pop(_SEAL, None)
    if saved != seal(facts):
        raise DamagedError(f"{NAME}: hash {seal(facts)}, and {saved} was saved; it was changed after it was written")
    return facts


def manifest_of(facts: Mapping[str, Any], path: Path) -> Manifest:
    """Return the manifest from what ``read_facts`` returned for ``path``."""
    missing = [key for key in _KEYS if key not in facts]
    unknown = sorted(facts.keys() - set(_KEYS))
    try:
        if missing:
            raise ValueError(f"it has no {missing[0]!r}")
        if unknown:
            raise ValueError(f"it has {unknown[0]!r}, which this version does not know")
        if not isinstance(facts["parts"], list) or not facts["parts"]:
            raise ValueError("its parts should be a list of files")
        return Manifest(
            settings=Settings.from_json(facts["settings"]),
            options=from_facts(SaveOptions, facts["habits"], "its options for saving"),
            progress=from_facts(Progress, facts["progress"], "its progress"),
            first_units=tuple(map(int, facts["first_units"])),
            data=dict(facts["data"]),
            parts=tuple(from_facts(Part, part, "its parts") for part in facts["parts"]),
            thinpipe=str(facts["thinpipe"]),
            torch=str(facts["torch"]),
        )
    except (ValueError, TypeError) as error:
        # The hash is right, so this is what was written: by a version that has more or fewer settings than this one.
        raise ForeignError(
            f"{path} was saved by thinpipe {facts.get('thinpipe')}, and this is {__version__}: {error}. Resume with "
            "the version that saved it"
        ) from None


def _parse(file: Path) -> dict[str, Any]:
    try:
        regular_size(file, TEXT_BYTES)
        facts = json.loads(file.read_bytes().decode())
    except OSError as error:
        raise DamagedError(f"{NAME}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DamagedError(f"{NAME} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{NAME} is empty, cut or not JSON: {error}") from None
    if not isinstance(facts, dict):
        raise DamagedError(f"{NAME} should be an object, got {json.dumps(facts)[:40]}")
    return facts
