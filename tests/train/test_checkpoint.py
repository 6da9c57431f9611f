"""Checkpoints that are damaged, of other versions, of other data: each is named, and the next older one taken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.pool import Pool
from tests.train.toy import Recorder, ToyTask, run_toy, train_toy
from thinpipe.cli.app import app
from thinpipe.launch import workers as launch
from thinpipe.train.checkpoints.manifest import read_manifest, seal
from thinpipe.train.engines.world import SetupError
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.task import Data, Shape, Source

NEWEST, OLDER = "step-00000008", "step-00000006"
GIVEN = {"compress": "none"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def saved(pool: Pool, made: Path, tmp_path: Path) -> Path:
    """Checkpoints of steps 2, 4, 6 and 8, the last, by two workers; a copy to be damaged."""
    if not (made / "run").exists():
        pool.run(train_toy, 2, "plain", RunOptions(save=made / "run", save_every=2, keep=9), GIVEN)
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def alone(made: Path, tmp_path: Path) -> Path:
    """The same by one process."""
    if not (made / "alone").exists():
        run_toy(None, ToyTask(), RunOptions(save=made / "alone", save_every=2, keep=9), parallel="none")
    shutil.copytree(made / "alone", tmp_path / "alone")
    return tmp_path / "alone"


def sha256_of(directory: Path) -> str:
    return read_manifest(directory / NEWEST).progress.parameters_sha256


def flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict[str, Any]], Any], *, sealed: bool = False) -> None:
    """Change a manifest; ``sealed``: as a version of thinpipe would have written it."""
    file = path / "manifest.json"
    facts = json.loads(file.read_text())
    told = facts.pop("xxh3_128")
    facts = change(facts) or facts
    file.write_text(json.dumps(facts | {"xxh3_128": seal(facts) if sealed else told}))


def put(path: Path, content: bytes) -> None:
    (path / "manifest.json").write_bytes(content)


def replace(path: Path, name: str, make: Callable[[Path], Any]) -> None:
    """Put something else in the place of a file."""
    (path / name).unlink()
    make(path / name)


def put_giant(file: Path) -> None:
    """Write a sparse file, which takes no room."""
    with file.open("wb") as opened:
        opened.truncate(1 << 40)


def link_to_zeros(file: Path) -> None:
    file.symlink_to("/dev/zero")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit in part 0": (lambda path: flip(path / "part-0.safetensors"), "part-0.safetensors: hash "),
    "bit in part 1": (lambda path: flip(path / "part-1.safetensors", 0.9), "part-1.safetensors: hash "),
    "bit in a header": (lambda path: flip(path / "part-1.safetensors", 0.001), "part-1.safetensors: "),
    "part cut": (lambda path: put_part(path, 1, lambda data: data[:1000]), "part-1.safetensors has 1000 bytes, and "),
    "part empty": (lambda path: put_part(path, 0, lambda data: b""), "part-0.safetensors has 0 bytes, and "),
    "part gone": (lambda path: (path / "part-1.safetensors").unlink(), "part-1.safetensors: No such file"),
    "part of another step": (
        lambda path: shutil.copy(path.parent / OLDER / "part-1.safetensors", path / "part-1.safetensors"),
        "part-1.safetensors: hash ",
    ),
    "manifest empty": (lambda path: put(path, b""), "manifest.json is empty, cut or not JSON"),
    "manifest cut": (
        lambda path: put(path, (path / "manifest.json").read_bytes()[:300]),
        "manifest.json is empty, cut or not JSON",
    ),
    "manifest gone": (lambda path: (path / "manifest.json").unlink(), "manifest.json: No such file"),
    "manifest not UTF-8": (lambda path: put(path, b'{"format": "\xe9"}'), "manifest.json is not UTF-8"),
    "manifest nested": (lambda path: put(path, b"[" * 100_000), "manifest.json is empty, cut or not JSON"),
    "manifest []": (lambda path: put(path, b"[]"), "manifest.json should be an object, got []"),
    "manifest {}": (lambda path: put(path, b"{}"), "manifest.json: its format should be 2, got null"),
    "format true": (lambda path: put(path, b'{"format": true}'), "its format should be 2, got true"),
    "format 1 as text": (lambda path: put(path, b'{"format": "1"}'), 'its format should be 2, got "1"'),
    "step edited": (lambda path: edit(path, lambda facts: facts["progress"].update(step=7)), "manifest.json: hash "),
    "no settings": (lambda path: edit(path, lambda facts: facts.update(settings={})), "manifest.json: hash "),
    "part a device": (
        lambda path: replace(path, "part-0.safetensors", link_to_zeros),
        "part-0.safetensors: it is a device, not a file",
    ),
    "part a FIFO": (
        lambda path: replace(path, "part-1.safetensors", os.mkfifo),
        "part-1.safetensors: it is a pipe (FIFO), not a file",
    ),
    "part giant": (lambda path: replace(path, "part-0.safetensors", put_giant), "has 1099511627776 bytes, and "),
    "manifest a device": (
        lambda path: replace(path, "manifest.json", link_to_zeros),
        "manifest.json: it is a device, not a file",
    ),
    "manifest a FIFO": (
        lambda path: replace(path, "manifest.json", os.mkfifo),
        "manifest.json: it is a pipe (FIFO), not a file",
    ),
    "manifest giant": (
        lambda path: replace(path, "manifest.json", put_giant),
        "manifest.json: it has 1.1 TB, more than 100 MB",
    ),
    "other keys": (lambda path: edit(path, lambda facts: {"format": 2, "some": 1}), "manifest.json: hash "),
}


def put_part(path: Path, worker: int, change: Callable[[bytes], bytes]) -> None:
    file = path / f"part-{worker}.safetensors"
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_next_older_one_loaded(pool: Pool, saved: Path, damage: str) -> None:
    whole = sha256_of(saved)
    harm, words = DAMAGES[damage]
    harm(saved / NEWEST)
    recorder = pool.run(train_toy, 2, "plain", RunOptions(save=saved, save_every=2, resume=saved), GIVEN)[0]
    (line,) = recorder.notices
    assert line.startswith("step 8 is damaged: ")
    assert words in line
    assert line.endswith("; going on from step 6")
    assert recorder.end.steps == 2
    assert recorder.end.parameters_sha256 == whole
    assert sha256_of(saved) == whole


def test_several_damaged_ones_are_each_named(pool: Pool, saved: Path) -> None:
    flip(saved / NEWEST / "part-1.safetensors")
    put(saved / OLDER, b"")
    recorder = pool.run(train_toy, 2, "plain", RunOptions(save=saved, resume=saved), GIVEN)[0]
    assert [line.partition(" is damaged")[0] for line in recorder.notices] == ["step 8", "step 6"]
    assert all(line.endswith("; going on from step 4") for line in recorder.notices)


def error_of(group: Any, running: RunOptions, given: dict[str, Any]) -> str:
    try:
        train_toy(group, "plain", running, given)
    except SetupError as error:
        return str(error)
    return "trained"


def test_without_an_intact_checkpoint_all_workers_name_each(pool: Pool, saved: Path) -> None:
    for step in (2, 4, 6, 8):
        flip(saved / f"step-0000000{step}" / f"part-{step % 4 // 2}.safetensors")
    errors = pool.run(error_of, 2, RunOptions(save=saved, resume=saved), GIVEN)
    assert errors[0] == errors[1]
    first, *lines = errors[0].splitlines()
    assert first == f"all checkpoints in {saved} are damaged:"
    assert [line.split(":")[0] for line in lines] == [f"  step-0000000{step}" for step in (8, 6, 4, 2)]
    assert "part-0.safetensors: hash" in lines[0]
    assert "part-1.safetensors: hash" in lines[1]
    assert lines[1].endswith("(worker 1)")


def test_a_requested_checkpoint_is_not_replaced_by_another(pool: Pool, saved: Path, tmp_path: Path) -> None:
    flip(saved / OLDER / "part-1.safetensors")
    errors = pool.run(error_of, 2, RunOptions(save=tmp_path / "other", resume=saved / OLDER), GIVEN)
    assert errors[0].startswith(f"{saved / OLDER} is damaged: part-1.safetensors: hash ")
    assert errors[0].endswith(f"; others in {saved}: step-00000008, step-00000004, step-00000002")


def thinpipe(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", *options])
    return result.exit_code, result.output


def without(facts: dict[str, Any], kind: str, name: str) -> None:
    del facts[kind][name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: {"format": 1, "thinpipe": "0.1.0"}, "is in format 1, which is made of pickles"),
        (lambda facts: facts | {"format": 3, "thinpipe": "9.0"}, "by thinpipe 9.0 in format 3, this version reads 2"),
        (lambda facts: facts["settings"].update(prompt=8), "its settings have 'prompt', which thinpipe does not know"),
        (lambda facts: without(facts, "settings", "lr"), "its settings have no 'lr'"),
        (lambda facts: facts["settings"].update(lr="fast"), "its settings: lr cannot be 'fast'"),
        (lambda facts: facts["settings"].update(compress_forward="zip:9"), "zip"),
        (lambda facts: facts.update(settings=[]), "its settings should be an object, got []"),
        (lambda facts: facts["progress"].update(step="6"), "its progress: step cannot be '6'"),
        (lambda facts: facts.update(parts=[]), "its parts should be a list of files"),
        (lambda facts: facts["parts"][0].update(name="/etc/passwd"), "a part is part-N.safetensors"),
        (lambda facts: facts.update(first_units=None), "was saved by thinpipe"),
        (lambda facts: facts.update(more=1), "it has 'more', which this version does not know"),
    ],
)
def test_other_versions_are_refused_in_one_line_before_workers_start(
    alone: Path, change: Callable[[dict[str, Any]], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_workers", lambda *args, **kwargs: pytest.fail("workers were started"))
    edit(alone / NEWEST, change, sealed=True)
    code, output = thinpipe("--resume", str(alone))
    assert code == 2
    assert words in output
    assert str(alone / NEWEST) in output
    assert output.startswith("thinpipe: ")
    assert len(output.splitlines()) == 1


def test_damaged_manifests_are_named_before_workers_start(alone: Path) -> None:
    for path in alone.iterdir():
        put(path, b"")
    code, output = thinpipe("--resume", str(alone))
    assert code == 2
    assert output.count("manifest.json is empty, cut or not JSON") == 4
    code, output = thinpipe("--resume", str(alone / OLDER))
    assert code == 2
    assert output.startswith(f"thinpipe: {alone / OLDER} is damaged: manifest.json is empty")


def test_a_complete_run_whose_last_part_is_damaged_is_not_complete(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr("thinpipe.cli.training.run_with_restarts", lambda *args, **kwargs: calls.append(args) or 0)
    monkeypatch.setattr("thinpipe.train.data.check_possible", lambda *args: None)
    monkeypatch.setattr("thinpipe.train.tasks.tasks.task", lambda name: ToyTask())
    assert "this run is complete" in thinpipe("--resume", str(alone))[1]
    assert not calls
    flip(alone / NEWEST / "part-0.safetensors")
    assert thinpipe("--resume", str(alone)) == (0, "")
    settings, running = calls[0][:2]
    assert (running.resume, running.save, running.save_every, running.keep) == (alone, alone, 2, 9)
    assert settings.parallel == "none"


def test_missing_settings_of_older_versions_have_their_defaults(alone: Path) -> None:
    def older(facts: dict[str, Any]) -> None:
        without(facts, "settings", "recompute")
        facts |= {"thinpipe": "0.1.5", "torch": "2.11"}

    edit(alone / OLDER, older, sealed=True)
    recorder = run_toy(None, ToyTask(), RunOptions(resume=alone / OLDER), parallel="none")
    assert recorder.end is not None
    assert recorder.end.parameters_sha256 == sha256_of(alone)
    (line,) = recorder.notices
    assert f"{alone / OLDER} was saved by thinpipe 0.1.5 with torch 2.11, goes on with" in line


class Changed(ToyTask):
    """The toy's data with a change."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def load(self, source: Source) -> tuple[Data, Shape]:
        data, shape = super().load(source)
        train: Any = data.train
        if self.change == "a sample less":
            train.points, train.labels = train.points[1:], train.labels[1:]
        elif self.change == "a label":
            train.labels[7] = (train.labels[7] + 1) % 5
        elif self.change == "values":
            train.points[-1] *= 1.5
        return data, shape


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("a sample less", "80 training samples when it was saved, 79 now"),
        ("a label", "the labels of the training samples differ"),
        ("values", "the values of the training samples differ"),
    ],
)
def test_other_data_are_refused(alone: Path, change: str, words: str) -> None:
    with pytest.raises(SetupError, match=f"a run goes on with the data it began with, .*: {words}") as error:
        run_toy(None, Changed(change), RunOptions(resume=alone / OLDER), parallel="none")
    assert len(str(error.value).splitlines()) == 1


def test_checkpoints_of_another_run_are_refused(alone: Path) -> None:
    with pytest.raises(SetupError, match="is of another run: lr was another"):
        run_toy(None, ToyTask(), RunOptions(resume=alone), parallel="none", lr=0.5)


def test_resuming_without_a_notice_is_silent(alone: Path) -> None:
    recorder: Recorder = run_toy(None, ToyTask(), RunOptions(resume=alone / OLDER), parallel="none")
    assert recorder.notices == recorder.problems == []
