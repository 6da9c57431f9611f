"""thinpipe generate: texts for prompts on stdout. All other output goes to stderr, so that pipes work."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from thinpipe.cli.replicas import worker_errors
from thinpipe.cli.terminal import OutputError, one_line_errors, takes, write_or_print
from thinpipe.cli.train.command import Asked as Training
from thinpipe.cli.train.resolve import join_machines
from thinpipe.comm.errors import WorkerError
from thinpipe.comm.membership import COMPLETE, member, say_remote
from thinpipe.lab.records.record import Record, check_writable, columns_of, figure, row_of
from thinpipe.options import OptionError, flags_in_errors, like, option, read
from thinpipe.train.generation.settings import OUT, PANELS, WHAT, Settings

KIND = "generate"
_SIGPIPE = 128 + 13


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options of the command in addition to the settings."""

    prompts: Path | None = option(
        "File with prompts, one a line, or JSON lines with a field prompt.", panel=WHAT, metavar="FILE", default=None
    )
    jsonl: bool = option(
        "Print a JSON object per prompt (prompt, text, token_ids) in place of texts.", panel=OUT, default=False
    )
    json: Path | None = like(Training, "json", default=None)
    rank: int | None = like(Training, "rank", default=None)
    master: str | None = like(Training, "master", default=None)
    debug: bool = like(Training, "debug", default=False)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One prompt; speed and bytes are those of all prompts together."""

    prompt: str = figure("prompt", key=True)
    new_tokens: int = figure("new\ntokens", format="d")
    tokens_per_s: float = figure("tokens/s", format=".1f", better="higher")
    wire_bytes_per_token: float = figure("wire\nbytes/token", format=",.0f", better="lower")
    prefill_s: float = figure("prefill\ns", format=".3f", better="lower")
    client_ms: float = figure("a step:\nclient ms", format=".2f", better="lower")
    servers_ms: float = figure("servers\nms", format=".2f", better="lower")
    network_ms: float = figure("network\nms", format=".2f", better="lower")
    alike: int | None = figure("tokens\nas with none", format="d", better="higher")
    alike_first: int | None = figure("of these\nbefore any other", format="d", better="higher")
    text: str
    token_ids: list[int]
    plain_text: str | None
    plain_token_ids: list[int] | None


@takes(Asked, Settings, panels=PANELS)
def generate(
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to continue.")] = None,
    **given: Any,
) -> None:
    """Generate texts with a model on several workers.

    The client has the prompts, the tokens, and the layers before the first and
    after the last block; servers receive hidden states only, and keep keys and
    values of their own blocks. The text of a single prompt is printed token by
    token, several texts when their batch is done. Without prompts stdin is the
    prompt, if it is a pipe.

    On several machines, on each: thinpipe generate ... --workers 3 --rank N
    --master HOST:PORT

    Example: thinpipe generate --model llama --compress 8bit "Once upon a time"
    """
    asked = Asked(**read(Asked, given))
    from thinpipe.lab.netem.network import check_launch, thin_network
    from thinpipe.launch.workers import run_workers
    from thinpipe.train.checkpoints.folder import check_exported
    from thinpipe.train.generation.prompts import encode, read_prompts
    from thinpipe.train.models.saved_adapter import SavedAdapter

    if asked.debug:
        os.environ["THINPIPE_DEBUG"] = "1"
    with one_line_errors():
        join_machines(asked.rank, asked.master, given["workers"])
        chosen = read(Settings, given)
        if "adapter" in chosen:
            check_exported(chosen["adapter"], "adapter")
            chosen = SavedAdapter(Path(chosen["adapter"])).completed(chosen)
        if "model" not in chosen:
            raise OptionError("which model? Name a folder of transformers with {model}")
        settings = Settings(**chosen)
        settings.check_here()
        check_launch([settings.count], [settings.link])
        check_exported(settings.model)
        me, prompts = member(), None
        if me is None or me.rank == 0:  # servers compare theirs with the client's
            settings.pretrained.check_weights()
            if settings.adapter is not None:
                settings.built()  # checks that the adapter fits the model
            prompts = encode(read_prompts(prompt or [], asked.prompts), settings)
            if asked.json is not None:
                check_writable(asked.json)
    workers = settings.count if me is None else None
    with worker_errors(), thin_network(settings.link, settings.count) as network:
        options: dict[str, Any] = {"workers": workers, "network": network, "patience_s": settings.patience_s}
        outcome = run_workers(_work, settings, asked.jsonl, private=prompts, **options)[0]
    code = 2 if isinstance(outcome, str) else 0
    if isinstance(outcome, str):
        typer.echo(f"thinpipe: {outcome}", err=True)
    elif prompts is not None:
        code = _finish(asked, settings, [each.text for each in prompts], outcome)
    else:
        say_remote(COMPLETE)
    raise typer.Exit(code)


def _work(settings: Settings, as_json: bool, prompts: Any = None) -> Any:
    """Generate on this worker; return the client's runs, or an error message."""
    import torch

    from thinpipe.train.engines.world import SetupError, join_world
    from thinpipe.train.generation.worker import generate as generate_part

    with flags_in_errors():
        world = join_world(settings.devices)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        try:
            printer = _Printer([each.text for each in prompts or ()], as_json)
            return generate_part(settings, world, prompts, printer, None if as_json else _make_streamer)
        except SetupError as error:
            return str(error)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the buffer
            raise WorkerError("nobody reads stdout any more", _SIGPIPE) from None


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


def _finish(asked: Asked, settings: Settings, prompts: Sequence[str], runs: Sequence[Any]) -> int:
    """Print speed on stderr and write the record; return the exit code."""
    for name, run in zip((settings.compress, "none"), runs, strict=False):
        per_token = f", {run.wire_bytes / max(run.count, 1):,.0f} bytes on the wire for each" if run.wire_bytes else ""
        speed = run.count / max(run.seconds, 1e-9)
        typer.echo(f"{name}: {run.count} tokens in {run.seconds:.1f} s, {speed:.1f} tokens/s{per_token}", err=True)
        typer.echo(f"  {_times(run, settings.count)}", err=True)
    rows = [_figures(number, text, runs) for number, text in enumerate(prompts)]
    for number, row in enumerate(rows, 1):
        if row.alike is not None and row.plain_token_ids is not None:
            _tell_difference(number, row, len(row.plain_token_ids))
    if asked.json is None:
        return 0
    config = {"command": ["thinpipe", *sys.argv[1:]], **asdict(settings)}
    record = Record(kind=KIND, config=config, columns=columns_of(Figures), rows=tuple(map(row_of, rows)))
    try:
        write_or_print(record, asked.json)
    except OutputError as error:
        typer.echo(f"thinpipe: {error}", err=True)
        return 1
    return 0


def _times(run: Any, workers: int) -> str:
    """Return the times as text: up to the first token, then the mean per step."""
    client, servers, network = (1e3 * each for each in run.step_s)
    step = f"prefill {run.prefill_s:.2f} s, then {client + servers + network:.1f} ms a step"
    return step if workers == 1 else f"{step}: {client:.1f} client, {servers:.1f} servers, {network:.1f} network"


def _figures(number: int, prompt: str, runs: Sequence[Any]) -> Figures:
    run, plain = runs[0], runs[1] if len(runs) > 1 else None
    same = [one == other for one, other in zip(run.tokens[number], plain.tokens[number], strict=False)] if plain else []
    return Figures(
        prompt=prompt,
        new_tokens=len(run.tokens[number]),
        tokens_per_s=run.count / max(run.seconds, 1e-9),
        wire_bytes_per_token=run.wire_bytes / max(run.count, 1),
        prefill_s=run.prefill_s,
        client_ms=1e3 * run.step_s[0],
        servers_ms=1e3 * run.step_s[1],
        network_ms=1e3 * run.step_s[2],
        alike=sum(same) if plain else None,
        alike_first=(same.index(False) if False in same else len(same)) if plain else None,
        text=run.texts[number],
        token_ids=run.tokens[number],
        plain_text=plain.texts[number] if plain else None,
        plain_token_ids=plain.tokens[number] if plain else None,
    )


def _tell_difference(number: int, row: Figures, count: int) -> None:
    if row.token_ids == row.plain_token_ids:
        typer.echo(f"prompt {number}: all {count} tokens as with none", err=True)
        return
    typer.echo(
        f"prompt {number}: {row.alike} of {count} tokens as with none, the first {row.alike_first} of them before any "
        f"other. With none:\n{row.plain_text}",
        err=True,
    )
