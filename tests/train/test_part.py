"""A worker's part of a checkpoint: what safetensors reads of it, and what is noticed of a file that was changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from thinpipe.train.checkpoints.part import DamagedError, Part, PartStream, read_part, verify_part, write_pieces

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    torch.bool,
]


def state() -> dict[str, Tensor]:
    whole = torch.randn(6, 10)
    kinds = {f"kind/{dtype}": torch.arange(7).to(dtype) for dtype in DTYPES}
    return kinds | {
        "count": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "whole": whole,
        "shared": whole[2:4],
        "transposed": whole.t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "random/0/cpu": torch.get_rng_state(),
        "großer Name": torch.ones(1, requires_grad=True),
    }


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Part]:
    return tmp_path, write_pieces(tmp_path / "part-0.safetensors", PartStream(state()).pieces())


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    saved = state()
    part = write_pieces(tmp_path / "part-0.safetensors", PartStream(saved).pieces())
    assert part.bytes == PartStream(saved).bytes == (tmp_path / part.name).stat().st_size
    for loaded in (load_file(tmp_path / part.name), read_part(tmp_path, part, lambda name: True)):
        assert loaded.keys() == saved.keys()
        for name, tensor in saved.items():
            assert loaded[name].dtype == tensor.dtype
            assert loaded[name].shape == tensor.shape
            assert loaded[name].tolist() == tensor.tolist()


def test_only_wanted_tensors_are_read_and_outlive_their_file(written: tuple[Path, Part]) -> None:
    directory, part = written
    loaded = read_part(directory, part, lambda name: name == "whole")
    before = loaded["whole"].clone()
    with (directory / part.name).open("r+b") as file:
        file.write(bytes(part.bytes))
    assert loaded.keys() == {"whole"}
    assert torch.equal(loaded["whole"], before)


@pytest.mark.parametrize("place", [0, 8, 20, 0.2, 0.5, 0.9, -1])
def test_one_bit_is_noticed_wherever_it_is(written: tuple[Path, Part], place: float) -> None:
    directory, part = written
    data = bytearray((directory / part.name).read_bytes())
    data[int(place * len(data)) if isinstance(place, float) else int(place)] ^= 1
    (directory / part.name).write_bytes(data)
    with pytest.raises(DamagedError, match=r"^part-0.safetensors: hash [0-9a-f]{32}, and [0-9a-f]{32} was saved$"):
        verify_part(directory, part)
    with pytest.raises(DamagedError, match=r"^part-0.safetensors: "):
        read_part(directory, part, lambda name: True)


@pytest.mark.parametrize("size", [0, 7, 100])
def test_another_size_is_noticed(written: tuple[Path, Part], size: int) -> None:
    directory, part = written
    (directory / part.name).write_bytes((directory / part.name).read_bytes()[:size])
    for look in (lambda: verify_part(directory, part), lambda: read_part(directory, part, lambda name: True)):
        with pytest.raises(DamagedError, match=f"part-0.safetensors has {size} bytes, and {part.bytes} were saved"):
            look()


def test_a_part_is_a_file_of_its_folder() -> None:
    with pytest.raises(ValueError, match=r"a part is part-N.safetensors, got '../part-0.safetensors'"):
        Part(name="../part-0.safetensors", bytes=1, xxh3_128="")
