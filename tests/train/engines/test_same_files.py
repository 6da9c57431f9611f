"""Files that every worker reads, on machines that have them in different places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.train.toy import world_in
from thinpipe.train.engines.same_files import check_same_files
from thinpipe.train.engines.world import SetupError


def found(group: Any, given: list[str | None]) -> str:
    """Return the error of a worker that was started with its entry of ``given``."""
    name = given[group.rank()]

    def identify(option: str) -> dict[str, str]:
        assert option == "model"
        assert name is not None
        if name == "damaged":
            raise ValueError("its header is damaged")
        return {"config.json": Path(name).name.partition("-")[0], "weights": Path(name).name}

    try:
        check_same_files({"model": name}, identify, world_in(group))
    except SetupError as error:
        return str(error)
    return "the same"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("here/llama", "there/llama", "llama"), "the same"),
        ((None, None, None), "the same"),
        (
            ("llama", "llama", "llama-2"),
            "model names another model on worker 2 ({}/llama-2) than on the client: "
            "weights differ; bring the client's folder to that machine",
        ),
        (
            ("llama", "gpt", "llama"),
            "model names another model on worker 1 ({}/gpt) than on the client: "
            "config.json and weights differ; bring the client's folder to that machine",
        ),
        (
            ("llama", "llama", "nope"),
            "worker 2 has no folder {}/nope: bring the client's, and name it there with model",
        ),
        (
            ("llama", None, "llama"),
            "all workers are started with the same options, and worker 1 was started without model: give it there",
        ),
        (
            (None, "llama", "llama"),
            "all workers are started with the same options, and the client was started without model: give it there",
        ),
        (("llama", "damaged", "llama"), "worker 1: its header is damaged"),
        (("damaged", "llama", "llama"), "its header is damaged"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_contents_are_compared_and_paths_are_not(
    pool: Pool, tmp_path: Path, names: tuple[str | None, ...], message: str
) -> None:
    for name in names:
        if name not in (None, "nope"):
            (tmp_path / str(name)).mkdir(parents=True, exist_ok=True)
    given = [name if name in (None, "damaged") else str(tmp_path / str(name)) for name in names]
    if "damaged" in given:
        given = ["damaged" if name == "damaged" else name and "llama" for name in given]  # names of the hub
    assert pool.run(found, 3, given) == [message.format(tmp_path)] * 3
