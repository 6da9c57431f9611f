"""Export of a trained model as the folder that ``save_pretrained`` would write, from its tensors one by one.

1  a twin is built from the model's config, without weights: what ``from_pretrained`` will build
2  the library's conversions run on meta tensors: they give names and shapes, so files can be laid out
3  files are written next to the folder as tensors arrive, in any order; at most one block's are in memory
4  everything is synced to disk, and the folder is renamed to its final name

So the folder is either complete or absent. A model that transformers cannot build from a config is saved as weights
alone.

Private names of transformers used in this module, seen on 5.17 and 5.22: ``core_model_loading``,
``all_tied_weights_keys``, ``_keys_to_ignore_on_save``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.system.files import read_bytes, read_folder, sync
from thinpipe.train.models.pretrained import quiet
from thinpipe.train.models.weights import params_on_meta

SHARD_BYTES = 5_000_000_000  # maximum file size, unless one tensor is larger: transformers' long-standing default
_PATTERN, _INDEX = "model{suffix}.safetensors", "model.safetensors.index.json"
_PARTIAL = ".thinpipe-export"  # next to the folder, until it is complete
# The names in safetensors.
DTYPES = {
    getattr(torch, name): short
    for name, short in (
        *(("float64", "F64"), ("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16"), ("bool", "BOOL")),
        *((f"{kind}{bits}", f"{kind[0].upper()}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *(("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")),
    )
}


class ModelForm:
    """The file layout of a model, derived from the model alone: it may be on the meta device."""

    def __init__(self, model: nn.Module, *, shard_bytes: int = SHARD_BYTES) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards

        self.name = type(model).__name__
        self.twin = _twin(model)  # None: transformers would not build this model from its config
        self._kept = _kept_names(model)
        skipped = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        self.held = {name: empty_like(tensor) for name, tensor in model.state_dict().items()}
        kept = dict.fromkeys(self._kept.values())
        self.tensors = {name: self.held[name] for name in kept if name not in skipped}  # without duplicates
        self.groups = self._grouped()
        made = {name: tensor for names in self.groups.values() for name, tensor in self._made(names).items()}
        most = shard_bytes if self.twin is not None else sys.maxsize  # an index is transformers' own format
        split = split_torch_state_dict_into_shards(made, filename_pattern=_PATTERN, max_shard_size=most)
        files = {file: {name: made[name] for name in names} for file, names in split.filename_to_tensors.items()}
        self._set_files(files, dict(split.tensor_to_filename))
        self._totals = dict(split.metadata)

    def _set_files(self, files: Mapping[str, Mapping[str, Tensor]], file_of: dict[str, str]) -> None:
        self.files = {file: TensorFile(tensors, {"format": "pt"}) for file, tensors in files.items()}
        self.file_of = file_of
        self.parameters = sum(tensor.numel() for tensor in self.tensors.values())
        self.bytes = sum(file.bytes for file in self.files.values())

    def kept(self, name: str) -> str | None:
        """Return the name under which a tensor, or the tensor that it shares, is saved; None if it is not saved."""
        kept = self._kept[name]
        return kept if kept in self.tensors else None

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise ValueError unless the model has a tensor of this name, shape and dtype."""
        wanted = self.held.get(name)
        if wanted is None:
            raise ValueError(f"{self.name} has no tensor {name}: this is of another model")
        if (list(shape), dtype) != (list(wanted.shape), wanted.dtype):
            raise ValueError(
                f"{name} of {self.name} is {_shown(wanted.shape, wanted.dtype)}, and {_shown(shape, dtype)} came: this "
                "is of another model"
            )

    def converted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors as ``save_pretrained`` writes them: fused experts split, names as on the hub."""
        if self.twin is None:
            return dict(tensors)
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.twin, dict(tensors)))

    def small_files(self) -> dict[str, bytes]:
        """Return config and index, by file name."""
        files: dict[str, bytes] = {}
        if self.twin is not None:
            config: Any = self.twin.config
            files["config.json"] = config.to_json_string().encode()
            if self.twin.can_generate():
                files["generation_config.json"] = self.twin.generation_config.to_json_string().encode()
        if len(self.files) > 1:
            totals = {"total_parameters": self.parameters, **self._totals}
            index = {"metadata": totals, "weight_map": self.file_of}
            files[_INDEX] = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
        return files

    def _grouped(self) -> dict[str, list[str]]:
        """Return which tensors are converted together: those of a block, or all if that would change the result."""
        groups: dict[str, list[str]] = defaultdict(list)
        for name in self.tensors:
            groups[_block(name)].append(name)
        together = {name: tensor.shape for name, tensor in self._made(self.tensors).items()}
        apart = {name: tensor.shape for names in groups.values() for name, tensor in self._made(names).items()}
        return dict(groups) if together == apart else {"": list(self.tensors)}

    def _made(self, names: Iterable[str]) -> dict[str, Tensor]:
        made = self.converted({name: self.tensors[name] for name in names})
        return {name: empty_like(tensor) for name, tensor in made.items()}  # not a view, whose storage has other sizes


class ModelFolder:
    """A writer of a model's folder: ``put`` tensors, ``add`` files; the folder appears when the ``with`` block ends.

    Raises OSError if writing fails and ValueError for tensors that are not the model's; then nothing is left on disk.
    """

    def __init__(self, path: Path, form: ModelForm) -> None:
        self._path, self.form = path.resolve(), form
        self._partial = partial_path(path)
        self._handles: dict[str, int] = {}
        self._group = {name: group for group, names in form.groups.items() for name in names}
        self._waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
        self._missing = set(form.tensors)

    def __enter__(self) -> ModelFolder:
        shutil.rmtree(self._partial, ignore_errors=True)  # left by a run that was killed
        try:
            with self._errors_named():
                self._partial.mkdir()
                for name, file in self.form.files.items():
                    self._handles[name] = os.open(self._partial / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                    self._write(name, memoryview(file.header), 0)
            self.add(self.form.small_files())
        except BaseException:
            self._drop()
            raise
        return self

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the model, by any of its names."""
        self.form.check(name, tensor.shape, tensor.dtype)
        kept = self.form.kept(name)
        if kept is None:
            return
        group = self._group[kept]
        waiting = self._waiting[group]
        waiting[kept] = tensor.detach()
        self._missing.discard(kept)
        if len(waiting) == len(self.form.groups[group]):
            made = self.form.converted(self._waiting.pop(group))
            with self._errors_named():
                for name, value in made.items():
                    file = self.form.file_of[name]
                    data = value.cpu().contiguous().view(-1).view(torch.uint8).numpy()
                    self._write(file, memoryview(data), self.form.files[file].offset(name))  # type: ignore[arg-type]

    def add(self, files: Mapping[str, bytes]) -> None:
        """Write files by name; an existing one of the same name is replaced."""
        for name, content in files.items():
            file = self._partial / name
            with self._errors_named():
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
                sync(file)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            self._drop()

    def _complete(self) -> None:
        if self._missing:
            raise ValueError(f"{min(self._missing)} of {self.form.name} is missing: this is of another model")
        with self._errors_named():
            for handle in self._handles.values():
                os.fsync(handle)
            sync(self._partial)
            os.rename(self._partial, self._path)  # replaces an empty folder and nothing else
            sync(self._path.parent)

    def _write(self, name: str, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._handles[name], data, offset)
            data, offset = data[written:], offset + written

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Report errors with the user's folder, not with its temporary name."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def _drop(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles = {}
        shutil.rmtree(self._partial, ignore_errors=True)


def partial_path(path: Path) -> Path:
    """Return where a folder is written until it is complete: on the same file system, under a hidden name."""
    complete = path.resolve()
    return complete.with_name(f".{complete.name}{_PARTIAL}")


def check_new_folder(path: Path) -> None:
    """Raise ValueError unless a folder can get this name: existing content is never replaced."""
    problem = None
    try:
        if os.path.ismount(path):
            problem = "is a mounted disk; name a folder in it"
        elif path.is_dir() and any(path.iterdir()):
            problem = "is there and not empty; name another, or remove it"
        elif os.path.lexists(path) and not path.is_dir():
            problem = "is something else; name another"
    except OSError as error:
        problem = f"cannot be one: {error.strerror}; name another"
    if problem is not None:
        raise ValueError(f"a model is written into a new folder, and {path} {problem}")


def saved_files(save: Callable[[str], object]) -> dict[str, bytes]:
    """Return the files that ``save_pretrained`` of a tokenizer or the like writes, by name."""
    with tempfile.TemporaryDirectory(prefix="thinpipe-") as name, quiet():
        save(name)
        return read_folder(Path(name))


def copied_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of those of these files that a folder has."""
    files = [folder / name for name in names]
    return {file.name: read_bytes(file, "a file of the model") for file in files if file.is_file()}


def _twin(model: Any) -> Any:
    """Return the model that its config describes, on the meta device; None if that computes something else."""
    if not hasattr(model, "base_model_prefix"):
        return None
    with torch.random.fork_rng(devices=[]), params_on_meta(), quiet():
        twin = type(model)(deepcopy(model.config))
    if _computation(twin) != _computation(model):
        return None
    twin.config.dtype = str(model.dtype).removeprefix("torch.")  # as ``save_pretrained`` sets both
    twin.config.architectures = [type(model).__name__]
    return twin


def _computation(model: nn.Module) -> dict[str, str]:
    """Return what every module computes in evaluation, without dropout and the momentum of running statistics."""
    return {
        name: re.sub(r"momentum=[^,)]*", "", f"{type(module).__name__}({module.extra_repr()})")
        for name, module in model.named_modules()
        if not isinstance(module, nn.Dropout)
    }


def _kept_names(model: nn.Module) -> dict[str, str]:
    """Map the names of all tensors to the name that each is saved under: never one declared as a tied copy."""
    copies = set(getattr(model, "all_tied_weights_keys", None) or ())
    held = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name in sorted(held, key=copies.__contains__):
        first.setdefault(id(held[name]), name)
    return {name: first[id(tensor)] for name, tensor in held.items()}


def _block(name: str) -> str:
    """Return a name up to its first number, which is a layer's; the full name if it has none."""
    found = re.match(r"(.*?\.)?\d+(?=\.)", name)
    return found[0] if found else name


def empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _shown(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class TensorFile:
    """The layout of a safetensors file, known before its tensors, so that it can be written in pieces.

    The layout is a header followed by the values and depends on shapes and dtypes only.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        # The widest dtypes first, so that each tensor is aligned to its element size.
        self.names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        described: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
        starts, end = {}, 0
        for name in self.names:
            tensor = tensors[name]
            starts[name], end = end, end + tensor.numel() * tensor.element_size()
            offsets = [starts[name], end]
            described[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.bytes = len(self.header) + end
        self._starts = starts

    def offset(self, name: str) -> int:
        """Return the offset of a tensor's values in the file."""
        return len(self.header) + self._starts[name]
