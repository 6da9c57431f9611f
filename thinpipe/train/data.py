"""The data of a run: preflight checks, loading on the workers that need it, and a fingerprint that all compare.

The fingerprint identifies a data set, so that a resumed run continues with the samples it began with. For the training
and the validation part it has the number of samples; what the split describes of all samples without reading them
(labels; for texts, all tokens; for pictures in folders, names below the folder and sizes of the files); and a sketch,
the mean absolute value of each of some samples spread over the part. The sketch is compared with a tolerance because
machines decode and resize slightly differently.

It detects an added or missing sample, another order, another label, a changed text, and a picture renamed or replaced
by one of another length. It does not detect a picture replaced by one of the same name and length, unless the sketch
contains it. For public pictures, which are not files, it has only number, labels and sketch. The location of the data
does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from thinpipe.options import OptionError
from thinpipe.pipeline.partition import choose_cuts
from thinpipe.system.sizes import check_fits
from thinpipe.system.tensors import dtype_named, spec_of
from thinpipe.train.engines.same_files import check_same_files
from thinpipe.train.engines.units import Meta, meta_of
from thinpipe.train.engines.world import SetupError, World
from thinpipe.train.models.adapters import adapt
from thinpipe.train.models.quantized import check_installed
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.sources import SHARED_FILES, identity
from thinpipe.train.tasks.task import Batch, Data, Described, Shape, Source, Split, Task

_IMAGE = 3 * 4  # bytes of a pixel: three colours, floats
_SKETCHED = 32  # samples per part
_TOLERANCE = 0.02  # of values of about 1; relative above


@dataclass(frozen=True)
class Facts:
    """Facts about the data that the workers reading it send to the others."""

    shape: Shape
    train_samples: int
    validation_samples: int
    inputs: tuple[Meta, ...]  # of one sample
    repeats: bool = False  # the inputs of a sample are the same in every epoch

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON, without the class names: no model needs them for training."""
        inputs = [spec_of(meta) for meta in self.inputs]
        return asdict(self) | {"inputs": inputs, "shape": asdict(replace(self.shape, labels=None))}

    @staticmethod
    def from_json(facts: dict[str, Any]) -> Facts:
        inputs = tuple(Meta(tuple(shape), dtype_named(dtype)) for shape, dtype in facts["inputs"])
        counts = (facts["train_samples"], facts["validation_samples"])
        return Facts(Shape(**facts["shape"]), *counts, inputs, facts["repeats"])


def check_possible(task: Task, settings: Settings, adapter: SavedAdapter | None = None) -> None:
    """Raise ValueError for errors that can be detected without reading samples or building the model."""
    check_objective(task, settings)
    if settings.quantize is not None:
        check_installed()
    source = settings.source
    units = task.preflight(source)
    if settings.lora is not None or settings.freeze or adapter is not None:
        model = task.init_on_meta(source)
        if model is not None and adapter is not None:
            adapter.put_on(model, with_head=False)  # the classes are known only from the data
        elif model is not None:
            adapt(model, settings.adapters, settings.freeze, settings.seed)
    if source.width is not None:
        what = f"{{width}} {source.width:g}: the model, which each of {settings.workers} workers builds,"
        check_fits(what, settings.workers * task.weight_bytes(source), "take a smaller one")
    if source.image_size is not None:
        size, batch = source.image_size, settings.batch_size
        check_fits(
            f"{{image_size}} {size}: a batch of {batch}", batch * _IMAGE * size**2, "take smaller ones, or fewer"
        )
    if units is not None and settings.parallel == "pipeline":
        choose_cuts(units, settings.workers, settings.layout, client_layers=settings.client_layers)


def check_objective(task: Task, settings: Settings) -> None:
    """Raise OptionError unless the settings fit the loss of a task."""
    if settings.dpo_beta is not None and not task.has_pairs:
        raise OptionError("{dpo_beta} is of the task preference; leave it out, or give {task} preference")
    if task.has_pairs and (settings.parallel == "data" or several_read(settings)):
        raise OptionError(
            f"task {task.name} computes its loss on the client, which keeps what it compares with: give {{layout}} "
            "client-server, or {parallel} none"
        )


def check_files(settings: Settings, world: World) -> None:
    """Raise SetupError unless the files that all workers read are the same on all machines. A collective."""
    values = settings.to_json()
    given = {name: values[name] for name in SHARED_FILES}
    check_same_files(given, partial(identity, source=settings.source), world)


def read_data(
    task: Task,
    settings: Settings,
    world: World,
    companions: Path | None = None,
    *,
    trains: bool = True,
    loaded: tuple[Data, Facts] | None = None,
) -> tuple[Data | None, Facts]:
    """Load the data where it is needed, and return it (None elsewhere) with its facts.

    It is needed on the client, on the last worker of a linear pipeline, which computes the loss, and on every replica.
    ``companions``: the folder with the tokenizer that the run has saved; if given, the run continues with it.
    ``loaded``: the result of an earlier call, on the workers that need the data.
    """
    source = settings.source
    if companions is not None:
        source = replace(source, tokenizer=str(companions), vocabulary=None)
    is_end = settings.parallel == "pipeline" and world.worker == world.workers - 1
    reads = world.is_client or (several_read(settings) and (is_end or settings.parallel == "data"))

    def read() -> tuple[Data, Facts] | None:
        if not reads or loaded is not None:
            return loaded
        data, shape = _loaded(task, source)
        if trains and len(data.train) < settings.step_samples:
            batches = f" in {{accumulate}} {settings.accumulate} batches" if settings.accumulate > 1 else ""
            remedy = "take a smaller one" + ", or {no_packing}: a sample is several texts" * shape.packed
            raise OptionError(
                f"a step is filled with different samples: {{batch_size}} {settings.batch_size}{batches} is more than "
                f"the {len(data.train)} samples to train on; {remedy}"
            )
        sample = _first_sample(task, data.validation)
        repeats = getattr(data.train, "repeats", False)
        return data, Facts(shape, len(data.train), len(data.validation), meta_of(sample.inputs), repeats)

    found = world.together(read)
    facts = Facts.from_json(world.gather(found[1].to_json() if found else None)[0])
    if found is None:
        return None, facts
    return found[0], replace(facts, shape=replace(facts.shape, labels=found[1].shape.labels))


def _loaded(task: Task, source: Source) -> tuple[Data, Shape]:
    """Load a task's data; raise ValueError if its types are wrong, as a user's own task may return."""
    loaded = task.load(source)
    if not isinstance(loaded, tuple) or [type(each) for each in loaded] != [Data, Shape]:
        raise ValueError(f"task {task.name}: load should return (Data, Shape); it returned a {type(loaded).__name__}")
    data, shape = loaded
    if not len(data.validation):
        raise ValueError(f"task {task.name}: load returned no samples to validate with; it needs at least one")
    return data, shape


def _first_sample(task: Task, split: Split) -> Batch:
    """Return the first sample as a batch; raise ValueError unless its tensors are what a step takes."""
    batch = split.batch(torch.zeros(1, dtype=torch.int64))
    labels = batch.labels
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape[:1] != (1,):
        got = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise ValueError(f"task {task.name}: labels should be int64 [samples] or [samples, tokens]; got {got} for one")
    inputs = batch.inputs
    if not isinstance(inputs, tuple) or not all(isinstance(x, Tensor) and x.shape[:1] == (1,) for x in inputs):
        raise ValueError(f"task {task.name}: inputs should be a tuple of tensors, samples first; got {_text(inputs)}")
    return batch


def _text(inputs: Any) -> str:
    """Describe the inputs of a batch by their types and shapes."""
    each = inputs if isinstance(inputs, tuple) else (inputs,)
    shapes = ", ".join(str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in each)
    return f"a tuple of {shapes}" if isinstance(inputs, tuple) else f"no tuple: {shapes}"


def several_read(settings: Settings) -> bool:
    """Return True if workers other than the client read data: the last one of a linear pipeline, or replicas."""
    is_line = settings.parallel == "pipeline" and settings.layout == "linear"
    return is_line or (settings.parallel == "data" and settings.workers > 1)


def fingerprint_together(data: Data | None, world: World) -> dict[str, Any]:
    """Return the fingerprint of the client's samples; raise SetupError if another reader's differs. A collective."""
    fingerprints = world.gather(world.together(lambda: None if data is None else fingerprint(data)))
    for worker, theirs in enumerate(fingerprints):
        other = None if theirs is None else difference(fingerprints[0], theirs)
        if other is not None:
            raise SetupError(
                f"all who read data read the same, but worker {worker} does not have the client's: {other}"
            )
    return dict(fingerprints[0])


def fingerprint(data: Data) -> dict[str, Any]:
    """Return the fingerprint of both parts as JSON."""
    return {"training": _of_split(data.train), "validation": _of_split(data.validation)}


def difference(saved: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return the first difference between two fingerprints as text; None if there is none."""
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
        # NaN equals nothing: values that are not finite are compared as text.
        return len(saved) == len(found) and all(
            abs(one - other) <= _TOLERANCE * max(1.0, abs(one)) or repr(one) == repr(other)
            for one, other in zip(saved, found, strict=True)
        )
    return bool(saved == found)
