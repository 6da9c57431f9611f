"""The manifest of model files: what a client has, as JSON that a server checks before it creates a file.

    {"format": 1, "folders": {"model": {
        "files": {"config.json": "{...}"},
        "tensors": {"model.embed_tokens.weight": [[32000, 4096], "bfloat16"], ...},
        "identity": {"config.json": "...", "weights": "..."}, "digest": null}}}

Names are compared with a list, and there are no paths and no offsets: a server writes the layout of its own file. Small
files are those that loaders read, and no Python. ``identity`` is a sketch, the first values of every tensor; it cannot
see a change behind them, so it only finds a folder that may be the same. Equality is decided by the SHA-256 of all
bytes of the tensors that a server loads (transfer.py). That costs both sides a read of these tensors, at about 1.5 GB/s
with SHA instructions; it is paid only for what is needed, and while it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from json import dumps
from math import prod
from pathlib import Path
from typing import Any

from thinpipe.comm.group import LARGEST
from thinpipe.options import OptionError
from thinpipe.system.files import read_text
from thinpipe.system.tensors import Spec, dtype_name, spec_bytes
from thinpipe.train.models.adapters import ADAPTER_FILE
from thinpipe.train.models.identity import folder_identity
from thinpipe.train.models.pretrained import ADAPTER
from thinpipe.train.models.save import DTYPES
from thinpipe.train.models.saved_adapter import SavedAdapter
from thinpipe.train.models.weights import open_tensors, weight_files
from thinpipe.train.tasks.classifier import ClassifierTask
from thinpipe.train.tasks.sources import SHARED_FILES, shared_folder
from thinpipe.train.tasks.task import Source, Task

FORMAT = 1
CONFIG = "config.json"
FOLDERS = (*SHARED_FILES, "adapter")
_FILE_BYTES = 4 << 20  # of a small file; the largest configs, with names of 20,000 classes, have a third of it
_MOST_TENSORS = 200_000  # DeepSeek-V3 has 91,000
_MOST_BYTES = 1 << 46  # of all tensors: 64 TiB; the limit of the cache is far below
_TENSOR = re.compile(r"(?!__metadata__$)[!-~]{1,512}")  # a name in a safetensors file
_DTYPE_NAMES = {short: dtype_name(dtype) for dtype, short in DTYPES.items()}  # of safetensors -> of torch
_HASH = re.compile(r"[0-9a-f]{16,64}")


@dataclass(frozen=True, kw_only=True)
class FolderFiles:
    """The files of one folder: small ones with their contents, tensors with shape and dtype."""

    files: Mapping[str, str]
    tensors: Mapping[str, Spec] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    digest: str | None = None  # of the file of adapters

    @property
    def weight_file(self) -> str:
        """The name of the one file that a server writes tensors to."""
        return ADAPTER_FILE if ADAPTER in self.files else "model.safetensors"

    @property
    def bytes(self) -> int:
        return sum(map(spec_bytes, self.tensors.values()))

    @property
    def key(self) -> str:
        """A name for the folder in a cache; folders of the same key may differ in values behind the sketch."""
        return sha256(dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


Folders = Mapping[str, FolderFiles]  # option -> its files


def find_folders(source: Source, task: Task | None, adapter: Path | None) -> dict[str, tuple[Path, bool]]:
    """Return the folders that all workers of a run read, by option, and whether they read weights from them."""
    found = {}
    for name in SHARED_FILES:
        if getattr(source, name) is not None:
            folder, has_weights = shared_folder(name, source)
            if folder is not None:
                found[name] = folder, has_weights or name == "weights"
    if isinstance(task, ClassifierTask) and task.model(source) is None:
        checkpoint = task.own_checkpoint(source)
        if checkpoint is not None and checkpoint.folder is not None:
            found["weights"] = checkpoint.folder, True
    if adapter is not None:
        found["adapter"] = adapter, True
    return found


def describe_folder(name: str, folder: Path, *, weights: bool) -> FolderFiles:
    """Return the manifest entry of a folder on this machine; raise ValueError if servers cannot get it."""
    if name == "adapter":
        tensors = _specs(folder / ADAPTER_FILE)
        config = read_text(folder / ADAPTER, "the description of adapters", limit=_FILE_BYTES)
        return FolderFiles(files={ADAPTER: config}, tensors=tensors, digest=SavedAdapter(folder).digest())
    config = read_text(folder / CONFIG, "the description of a model", limit=_FILE_BYTES)
    found = {name: spec for file in weight_files(folder) for name, spec in _specs(file).items()} if weights else {}
    return FolderFiles(files={CONFIG: config}, tensors=found, identity=folder_identity(folder, weights=weights))


def _specs(file: Path) -> dict[str, Spec]:
    specs: dict[str, Spec] = {}
    with open_tensors(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118, it is no dict
            each = tensors.get_slice(name)
            dtype = _DTYPE_NAMES.get(each.get_dtype())
            if dtype is None or not _TENSOR.fullmatch(name):
                what = f"a tensor {ascii(name)[:80]} of type {each.get_dtype()}"
                raise ValueError(f"{file} has {what}, which servers do not take: copy the folder to them")
            specs[name] = [list(each.get_shape()), dtype]
    return specs


def to_json(folders: Folders) -> dict[str, Any]:
    """Return the manifest; raise OptionError if it is larger than a message between workers can be."""
    made = {"format": FORMAT, "folders": {name: asdict(each) for name, each in folders.items()}}
    size = len(dumps(made))
    if size > LARGEST // 2:
        raise OptionError(
            f"the description of the model's files has {size} bytes, and servers take {LARGEST // 2}: copy its folder "
            "to every machine, and start all workers with {rank} and {master}"
        )
    return made


def from_json(manifest: Any) -> dict[str, FolderFiles]:
    """Return the folders of a manifest that a client has sent; raise ValueError if it is not one."""
    facts = _fields(manifest, "the manifest", format=int, folders=dict)
    _check(facts["format"] == FORMAT, f"the format {FORMAT}: use the same version of thinpipe", facts["format"])
    return {name: _folder_from_json(name, each) for name, each in facts["folders"].items()}


def _folder_from_json(name: str, given: Any) -> FolderFiles:
    _check(name in FOLDERS, f"files of {', '.join(FOLDERS)}", name)
    facts = _fields(given, f"{name} in the manifest", files=dict, tensors=dict, identity=dict, digest=(str, type(None)))
    files, tensors, hashes = (
        facts["files"],
        facts["tensors"],
        [*facts["identity"].values(), facts["digest"] or "0" * 16],
    )
    wanted = ADAPTER if name == "adapter" else CONFIG
    _check(list(files) == [wanted], f"{wanted} and no other file of the {name}", list(files))
    text = files[wanted]
    _check(isinstance(text, str) and len(text) <= _FILE_BYTES, f"texts of at most {_FILE_BYTES} characters", text)
    _check(len(tensors) <= _MOST_TENSORS, f"at most {_MOST_TENSORS} tensors", len(tensors))
    for tensor, spec in tensors.items():
        _check(_is_spec(tensor, spec), "names, shapes and dtypes of tensors", [tensor, spec])
    _check(facts["identity"].keys() <= {CONFIG, "weights"}, "an identity of config and weights", facts["identity"])
    _check(all(isinstance(each, str) and _HASH.fullmatch(each) for each in hashes), "hashes", hashes)
    found = FolderFiles(**facts)
    _check(found.bytes <= _MOST_BYTES, f"tensors of at most {_MOST_BYTES} bytes", found.bytes)
    return found


def _is_spec(name: str, spec: Any) -> bool:
    """Return True if a tensor has a name, a shape and a dtype that a safetensors file can have."""
    if not (_TENSOR.fullmatch(name) and isinstance(spec, list) and len(spec) == 2 and isinstance(spec[0], list)):
        return False
    shape, dtype = spec
    sizes = len(shape) <= 8 and all(type(size) is int and size >= 0 for size in shape)
    fits = sizes and prod(max(size, 1) for size in shape) <= _MOST_BYTES
    return fits and isinstance(dtype, str) and dtype in _DTYPE_NAMES.values()


def _fields(given: Any, what: str, **kinds: Any) -> dict[str, Any]:
    """Return an object with exactly these fields of these types; raise ValueError otherwise."""
    is_object = isinstance(given, dict) and given.keys() == kinds.keys()
    if not is_object or not all(isinstance(given[name], kind) for name, kind in kinds.items()):
        found = {name: type(each).__name__ for name, each in given.items()} if isinstance(given, dict) else given
        raise ValueError(f"{what} should have the fields {', '.join(kinds)}; got {ascii(found)[:200]}")
    return dict(given)


def _check(holds: bool, rule: str, got: Any) -> None:
    if not holds:
        raise ValueError(f"the manifest of model files has {rule}; got {ascii(got)[:100]}")
