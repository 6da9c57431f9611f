"""Servers whose cache of model files is damaged, or whose disk is full, before a run of a language model."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.faults.expected import END_S, Expected
from tests.faults.fault import Fault, Impossible, starting
from tests.faults.kinds.networks import draw_how
from tests.faults.moments import AT_ONCE
from tests.faults.runs import Run, Setting
from tests.faults.served import RunWithServers
from tests.faults.undisturbed import Undisturbed


def draw_cache(random: random.Random, setting: Setting, undisturbed: Undisturbed) -> Fault:
    setting = replace(setting, files=undisturbed.files())
    server = random.randrange(1, setting.workers)
    if random.random() < 0.2:
        return _full(random, setting, server)
    damage, words = random.choice(_DAMAGES)
    drawn = type(random)(random.getrandbits(32))

    def start(run: Run) -> None:
        assert isinstance(run, RunWithServers)
        for number in range(1, setting.workers):
            undisturbed.cache(setting, number, run.cache(number))
        (folder,) = (run.cache(server) / "thinpipe" / "models").glob("*-*")
        damage(folder, drawn)
        starting()(run)

    return Fault(
        words=f"{words} in the cache of server {server}",
        strike=lambda run: None,
        moment=AT_ONCE,
        expected=_REJECTED if damage is _replace_weights else Expected("must"),
        start=start,
        how=draw_how(random),
        setting=setting,
        # What is there is none of the cache's files: only its owner may remove it.
        before_recovery=lambda run: shutil.rmtree(run.folder / f"cache-{server}"),
    )


def _full(random: random.Random, setting: Setting, server: int) -> Fault:
    """A disk that has room for some of the files."""
    if os.geteuid():
        raise Impossible("a small disk is mounted, which needs root")
    size = random.choice(("4k", "16k", "64k"))

    def start(run: Run) -> None:
        assert isinstance(run, RunWithServers)
        run.cache(server).mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "faults", str(run.cache(server))], check=True)
        starting()(run)

    def unmount(run: Run) -> None:
        assert isinstance(run, RunWithServers)
        subprocess.run(["umount", "--lazy", str(run.cache(server))], capture_output=True, check=False)

    return Fault(
        words=f"the disk of the cache of server {server} has {size}B",
        strike=lambda run: None,
        moment=AT_ONCE,
        expected=Expected("may", frozenset({1, 2}), cause=r"(?i)space|disk|cache", within_s=4 * END_S),
        start=start,
        how=draw_how(random),
        setting=setting,
        before_recovery=unmount,
        undo=unmount,
    )


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def _flip_weights(folder: Path, drawn: random.Random) -> None:
    content = bytearray(_weights(folder).read_bytes())
    for _ in range(drawn.randint(1, 20)):
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
    _weights(folder).write_bytes(content)


def _zero_weights(folder: Path, drawn: random.Random) -> None:
    size = _weights(folder).stat().st_size
    start = drawn.randrange(size)
    with _weights(folder).open("r+b") as file:
        file.seek(start)
        file.write(bytes(min(size - start, drawn.randint(1, 50_000))))


def _cut_weights(folder: Path, drawn: random.Random) -> None:
    os.truncate(_weights(folder), drawn.randrange(_weights(folder).stat().st_size))


def _replace_weights(folder: Path, drawn: random.Random) -> None:
    _weights(folder).unlink()
    if drawn.random() < 0.5:
        _weights(folder).symlink_to("/dev/null")
    else:
        _weights(folder).mkdir()


def _damage_list(folder: Path, drawn: random.Random) -> None:
    text = (folder / "blocks.json").read_text()
    others = (text[: drawn.randrange(len(text))], "", "[]", '{"other": "1"}', text.replace("1", "2"), "[" * 100_000)
    (folder / "blocks.json").write_text(drawn.choice(others))


def _claim_all(folder: Path, drawn: random.Random) -> None:
    """The list names blocks that are not there."""
    size = _weights(folder).stat().st_size
    header = 8 + int.from_bytes(_weights(folder).read_bytes()[:8], "little")
    with _weights(folder).open("r+b") as file:
        file.seek(header)
        file.write(bytes(size - header))


def _delete_file(folder: Path, drawn: random.Random) -> None:
    drawn.choice(sorted(folder.iterdir())).unlink()


def _change_config(folder: Path, drawn: random.Random) -> None:
    (folder / "config.json").write_text(drawn.choice(("", "{}", '{"model_type": "gpt2"}', "[" * 100_000)))


# Servers that connect to the client get layers in the order in which they come, each with a folder of its own.
_REJECTED = Expected("may", frozenset({2}), cause="model files are kept in", within_s=4 * END_S)
_DAMAGES: tuple[tuple[Callable[[Path, random.Random], None], str], ...] = (
    (_flip_weights, "bits of weights flipped"),
    (_zero_weights, "weights overwritten by zeros"),
    (_cut_weights, "the weights truncated"),
    (_replace_weights, "a link or a folder in place of the weights"),
    (_damage_list, "a damaged list of blocks"),
    (_claim_all, "a list of blocks that are not there"),
    (_delete_file, "a file deleted"),
    (_change_config, "another configuration"),
)
