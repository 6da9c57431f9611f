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
    facts = _fields(manifest, "the manifest", {"format": int, "folders": dict})
    if facts["format"] != FORMAT:
        raise ValueError(f"the manifest has format {facts['format']}, and {FORMAT} is read: use the same version")
    return {_one_of(name, FOLDERS): _folder_from_json(name, each) for name, each in facts["folders"].items()}


def _folder_from_json(name: str, given: Any) -> FolderFiles:
    facts = _fields(given, f"{name} in the manifest", {"files": dict, "tensors": dict, "identity": dict, "digest": Any})
    wanted = ADAPTER if name == "adapter" else CONFIG
    if list(facts["files"]) != [wanted]:
        raise ValueError(f"{name} in the manifest should have {wanted} alone; got {ascii(list(facts['files']))[:80]}")
    text = facts["files"][wanted]
    if not isinstance(text, str) or len(text) > _FILE_BYTES:
        raise ValueError(f"{wanted} in the manifest should be a text of at most {_FILE_BYTES} characters")
    if len(facts["tensors"]) > _MOST_TENSORS:
        raise ValueError(f"{name} in the manifest has {len(facts['tensors'])} tensors, and {_MOST_TENSORS} are allowed")
    for tensor, spec in facts["tensors"].items():
        _check_spec(tensor, spec)
    digest = facts["digest"]
    for each in (*facts["identity"], *facts["identity"].values(), *([] if digest is None else [digest])):
        if each not in (CONFIG, "weights") and not (isinstance(each, str) and _HASH.fullmatch(each)):
            raise ValueError(f"{name} in the manifest has the hash {ascii(each)[:80]}, which is none")
    found = FolderFiles(**facts)
    if found.bytes > _MOST_BYTES:
        raise ValueError(f"{name} in the manifest has {found.bytes} bytes of tensors, and {_MOST_BYTES} are allowed")
    return found


def _check_spec(name: str, spec: Any) -> None:
    """Raise ValueError unless a tensor has a name, a shape and a dtype that a safetensors file can have."""
    is_pair = isinstance(spec, list) and len(spec) == 2 and isinstance(spec[0], list) and len(spec[0]) <= 8
    shape, dtype = spec if is_pair else ([], None)
    sizes = all(type(size) is int and 0 <= size <= _MOST_BYTES for size in shape)
    known = isinstance(dtype, str) and dtype in _DTYPE_NAMES.values()
    if not (is_pair and sizes and known and _TENSOR.fullmatch(name)) or spec_bytes(spec) > _MOST_BYTES:
        raise ValueError(f"the manifest has a tensor {ascii(name)[:80]}: {ascii(spec)[:80]}, which is none")


def _fields(given: Any, what: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with exactly these fields; raise ValueError otherwise."""
    if not isinstance(given, dict) or given.keys() != kinds.keys():
        found = ascii(sorted(given))[:80] if isinstance(given, dict) else ascii(given)[:80]
        raise ValueError(f"{what} should have the fields {', '.join(kinds)}; got {found}")
    for name, kind in kinds.items():
        if kind is not Any and type(given[name]) is not kind:
            raise ValueError(f"{what}: {name} should be of type {kind.__name__}; got {ascii(given[name])[:80]}")
    return given


def _one_of(name: str, allowed: tuple[str, ...]) -> str:
    if name not in allowed:
        raise ValueError(f"the manifest has files of {ascii(name)[:80]}, and only {', '.join(allowed)} are read")
    return name
