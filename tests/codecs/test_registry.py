"""Codecs of other packages: specs that name a class, and entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

import thinpipe
from examples.own_codec import Sign
from tests.scripts import run_script
from thinpipe.codecs import registry
from thinpipe.codecs.recipes import recipe_of
from thinpipe.codecs.tile import Tile
from thinpipe.links.registry import link_codec

MODULE = """
from dataclasses import dataclass
from thinpipe import Codec
from thinpipe.codecs.tile import Tile

VALUE = 3

@dataclass(frozen=True)
class Half(Codec):
    bits: int = 4

    @property
    def spec(self):
        return f"{super().spec}:{self.bits}"

    @classmethod
    def parse(cls, arguments):
        return cls(int(arguments)) if arguments else cls()

    def float_bytes(self, shape, dtype):
        return shape.numel()

    def encode_floats(self, x, wire, state, key=0):
        wire.copy_(x.flatten())

    def decode_floats(self, wire, out):
        out.view(-1).copy_(wire)

class Unfinished(Codec):
    pass

class Renamed(Half):
    spec = "renamed"

class Other:
    pass

def factory(argument):
    return Tile(int(argument))

def broken(argument):
    return 8
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module own_codecs in the working directory."""
    (tmp_path / "own_codecs.py").write_text(MODULE)
    (tmp_path / "raises.py").write_text("raise RuntimeError('no licence\\nsecond line')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # entry points are those of installed packages
    yield
    for name in ("own_codecs", "raises"):
        sys.modules.pop(name, None)


def register(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    points = [metadata.EntryPoint(name, value, registry.GROUP) for name, value in names.items()]
    registry.entry_points.cache_clear()
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == registry.GROUP else [])


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    registry.entry_points.cache_clear()


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("own_codecs:Half", "own_codecs:Half:4"),
        (" own_codecs:Half:6 ", "own_codecs:Half:6"),
        ("examples.own_codec:Sign", "examples.own_codec:Sign"),
    ],
)
def test_a_class_is_named_by_its_module(own: None, given: str, canonical: str) -> None:
    codec = thinpipe.codec(given)
    assert codec.spec == canonical
    assert thinpipe.codec(canonical) == codec


def test_a_codec_of_a_module_encodes(own: None) -> None:
    codec = thinpipe.codec("own_codecs:Half")
    x = torch.tensor([1.0, 2.5, 3.0])
    assert codec.decode(codec.encode(x), torch.empty(3)).tolist() == [1, 2, 3]
    assert link_codec("own_codecs:Half").stateless_codec == codec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.module:Class", "cannot be imported: No module named 'missing'"),
        ("tlie:fast", "names none of thinpipe's codecs and, as package.module:Class, cannot be imported"),
        ("raises:Class", "cannot be imported: RuntimeError: no licence[.] There are: none, fp16"),
        ("own_codecs:Nothing", "cannot be imported: module 'own_codecs' has no attribute 'Nothing'"),
        ("own_codecs:Other", "own_codecs:Other is not a subclass of thinpipe.Codec: <class"),
        ("own_codecs:VALUE", "own_codecs:VALUE is not a subclass of thinpipe.Codec: 3"),
        ("own_codecs:factory:4", "own_codecs:factory is not a subclass of thinpipe.Codec: <function"),
        ("own_codecs:Unfinished", "makes no sense: it raised TypeError: Can't instantiate abstract class Unfinished"),
        ("own_codecs:Half:x", "makes no sense: invalid literal for int"),
        ("examples.own_codec:Sign:3", "'3' is one argument too many"),
        (
            "own_codecs:Renamed",
            "the property spec of its codec is 'renamed', from which other workers",
        ),
    ],
)
def test_a_class_that_is_no_codec_is_rejected(own: None, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        thinpipe.codec(spec)


def test_entry_points_extend_the_families(own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    register(
        monkeypatch, half="own_codecs:Half", short="own_codecs:factory", lost="missing:Class", odd="own_codecs:VALUE"
    )
    assert thinpipe.codec("half:6").spec == "own_codecs:Half:6"
    assert thinpipe.codec("short:4", kernels="reference") == Tile(4)
    with pytest.raises(ValueError, match=r"codec 'lost' is missing:Class, which cannot be imported: ModuleNotFound"):
        thinpipe.codec("lost")
    with pytest.raises(ValueError, match=r"own_codecs:VALUE is not a subclass"):
        thinpipe.codec("odd")
    with pytest.raises(ValueError, match=r"'short:x' makes no sense: .*; short takes the arguments that its class"):
        thinpipe.codec("short:x")
    with pytest.raises(ValueError, match=r"did you mean half\?.*topk:0.1, half, short, lost, odd"):
        thinpipe.codec("hlaf")


def test_a_function_that_returns_no_codec_is_rejected(own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, broken="own_codecs:broken")
    with pytest.raises(ValueError, match="it returned int, not a codec"):
        thinpipe.codec("broken")


@pytest.mark.parametrize("name", ["tile", "8bit", "axes"])
def test_a_name_of_thinpipe_cannot_be_registered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, **{name: "own_codecs:Half"})
    with pytest.raises(ValueError, match=f"registered as codec '{name}' .* already taken by thinpipe: uninstall"):
        thinpipe.codec("other:8")
    assert thinpipe.codec("tile:4") == Tile(4)


def test_a_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [metadata.EntryPoint("half", value, registry.GROUP) for value in ("first:Half", "second:Half")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    registry.entry_points.cache_clear()
    with pytest.raises(ValueError, match=r"second:Half is registered as codec 'half' .* already taken by first:Half"):
        thinpipe.codec("half")


def test_labels_of_records_import_nothing(own: None) -> None:
    assert recipe_of("raises:Class", "tile:8") is None
    assert "raises" not in sys.modules


def test_the_command_line_trains_with_a_codec_of_a_module(tmp_path: Path) -> None:
    """Workers find it from its spec, in processes of their own, also where the run is resumed."""
    train, saved = ("-m", "thinpipe", "train", "--threads", "1"), str(tmp_path / "run")
    first = ("--compress", "examples.own_codec:Sign", "--samples", "320", "--epochs", "2", "--image-size", "16")
    for options in ((*first, "--save", saved, "--steps", "4"), ("--resume", saved, "--steps", "6")):
        code, output = run_script(*train, *options)
        assert code == 0, output
        assert "examples.own_codec:Sign" in output
    assert Sign().spec == "examples.own_codec:Sign"
