"""thinpipe generate: texts for prompts on stdout. All other output goes to stderr, so that pipes work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from thinpipe.cli.command_runner import CommandOptions, is_client, resolving, run_once, write_record
from thinpipe.cli.terminal import takes
from thinpipe.options import option, read
from thinpipe.system.files import check_writable
from thinpipe.train.generation.settings import OUT, PANELS, WHAT, GenerationSettings

KIND = "generate"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(CommandOptions):
    """Options of the command in addition to the settings."""

    prompts: Path | None = option(
        "File with prompts, one a line, or JSON lines with a field prompt.", panel=WHAT, metavar="FILE", default=None
    )
    jsonl: bool = option(
        "Print a JSON object per prompt (prompt, text, token_ids) in place of texts.", panel=OUT, default=False
    )


@takes(GenerateOptions, GenerationSettings, panels=PANELS)
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

    On several machines: thinpipe serve --listen HOST:PORT on each server, then
    thinpipe generate ... --servers TICKET,TICKET. On a trusted network also, on
    each: thinpipe generate ... --workers 3 --rank N --master HOST:PORT

    Example: thinpipe generate --model llama --compress 8bit "Once upon a time"
    """
    from thinpipe.lab.netem.network import check_launch
    from thinpipe.lab.runs.generation import GenerationColumns, difference_lines, speed_lines
    from thinpipe.train.generation.printing import generate_on_worker
    from thinpipe.train.generation.prompts import encode, read_prompts

    with resolving(GenerateOptions, given) as options:
        settings = GenerationSettings.resolve(read(GenerationSettings, given))
        check_launch([settings.count], [settings.link])
        prompts = None
        if is_client():  # servers compare their files with the client's
            settings.check_model()
            prompts = encode(read_prompts(prompt or [], options.prompts), settings)
            if options.json is not None:
                check_writable(options.json)

    def report(runs: Any) -> int:
        assert prompts is not None
        rows = [GenerationColumns.of(number, each.text, runs) for number, each in enumerate(prompts)]
        for line in (*speed_lines(settings, runs), *difference_lines(rows)):
            typer.echo(line, err=True)
        return write_record(options.json, KIND, asdict(settings), rows)

    processes = settings.count
    run_once(
        report, generate_on_worker, settings, options.jsonl, processes=processes, running=settings, private=prompts
    )
