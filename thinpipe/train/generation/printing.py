"""Generation as a worker of `thinpipe generate`: its texts on stdout, as they are done."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from thinpipe.comm.errors import WorkerError
from thinpipe.train.engines.world import World
from thinpipe.train.generation.prompts import Prompt
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.generation.worker import GenerationRun, generate

_SIGPIPE = 128 + 13


def generate_on_worker(
    world: World, settings: GenerationSettings, as_json: bool, prompts: Sequence[Prompt] | None = None
) -> list[GenerationRun]:
    """Generate on this worker; the client, which has the prompts, prints the texts and returns its runs."""
    try:
        printer = _Printer([each.text for each in prompts or ()], as_json)
        return generate(settings, world, prompts, printer, None if as_json else _make_streamer)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the buffer
        raise WorkerError("stdout was closed by its reader", _SIGPIPE) from None


class _Printer:
    """Prints texts as they are done: as JSON lines, or each under its number and prompt."""

    def __init__(self, prompts: Sequence[str], as_json: bool) -> None:
        self._prompts, self._as_json = prompts, as_json

    def __call__(self, number: int, text: str, tokens: list[int]) -> None:
        prompt = self._prompts[number]
        if self._as_json:
            print(json.dumps({"prompt": prompt, "text": text, "token_ids": tokens}, ensure_ascii=False), flush=True)
            return
        shown = textwrap.shorten(prompt, 72, placeholder=" ...")
        print(f"{chr(10) if number else ''}=== {number + 1} of {len(self._prompts)}: {shown}\n{text}", flush=True)


def _make_streamer(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
