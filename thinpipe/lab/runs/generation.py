"""The results of a generation as columns of a record and as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thinpipe.lab.records.record import column
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.generation.worker import GenerationRun


@dataclass(frozen=True, kw_only=True)
class GenerationColumns:
    """One prompt; speed and bytes are those of all prompts together."""

    prompt: str = column("prompt", key=True)
    new_tokens: int = column("new\ntokens", format="d")
    tokens_per_s: float = column("tokens/s", format=".1f", better="higher")
    wire_bytes_per_token: float = column("wire\nbytes/token", format=",.0f", better="lower")
    prefill_s: float = column("prefill\ns", format=".3f", better="lower")
    client_ms: float = column("a step:\nclient ms", format=".2f", better="lower")
    servers_ms: float = column("servers\nms", format=".2f", better="lower")
    network_ms: float = column("network\nms", format=".2f", better="lower")
    accepted: float | None = column("drafts\naccepted", format=".1%", better="higher")
    tokens_per_step: float | None = column("tokens\na step", format=".2f", better="higher")
    alike: int | None = column("tokens\nas with none", format="d", better="higher")
    alike_first: int | None = column("of these\nbefore any other", format="d", better="higher")
    text: str
    token_ids: list[int]
    plain_text: str | None
    plain_token_ids: list[int] | None

    @staticmethod
    def of(number: int, prompt: str, runs: Sequence[GenerationRun]) -> GenerationColumns:
        """Return the row of a prompt: of the run with the codec, compared with the one without, if there is one."""
        run, plain = runs[0], runs[1] if len(runs) > 1 else None
        same = [a == b for a, b in zip(run.tokens[number], plain.tokens[number], strict=False)] if plain else []
        client_s, servers_s, network_s = run.step_s
        return GenerationColumns(
            prompt=prompt,
            new_tokens=len(run.tokens[number]),
            tokens_per_s=run.tokens_per_s,
            wire_bytes_per_token=run.wire_bytes / max(run.count, 1),
            prefill_s=run.prefill_s,
            client_ms=1e3 * client_s,
            servers_ms=1e3 * servers_s,
            network_ms=1e3 * network_s,
            accepted=run.accepted / run.drafted if run.drafted else None,
            tokens_per_step=run.tokens_per_step if run.drafted else None,
            alike=sum(same) if plain else None,
            alike_first=(same.index(False) if False in same else len(same)) if plain else None,
            text=run.texts[number],
            token_ids=run.tokens[number],
            plain_text=plain.texts[number] if plain else None,
            plain_token_ids=plain.tokens[number] if plain else None,
        )


def speed_lines(settings: GenerationSettings, runs: Sequence[GenerationRun]) -> Iterator[str]:
    """Yield the speed and the times of each run: up to the first token, then the mean per step."""
    for name, run in zip((settings.compress, "none"), runs, strict=False):
        per_token = f", {run.wire_bytes / max(run.count, 1):,.0f} bytes on the wire for each" if run.wire_bytes else ""
        yield f"{name}: {run.count} tokens in {run.seconds:.1f} s, {run.tokens_per_s:.1f} tokens/s{per_token}"
        client, servers, network = (1e3 * each for each in run.step_s)
        parts = f": {client:.1f} client, {servers:.1f} servers, {network:.1f} network" if settings.count > 1 else ""
        yield f"  prefill {run.prefill_s:.2f} s, then {client + servers + network:.1f} ms a step{parts}"
        if run.drafted:
            yield (
                f"  drafts: {run.accepted} of {run.drafted} tokens accepted ({run.accepted / run.drafted:.1%}), "
                f"{run.tokens_per_step:.2f} tokens a step, {1e3 * run.decode_s / run.after_prefill:.1f} ms a token"
            )


def difference_lines(rows: Sequence[GenerationColumns]) -> Iterator[str]:
    """Yield how the texts differ from those without compression, if there are any."""
    for number, row in enumerate(rows, 1):
        if row.plain_token_ids is None:
            continue
        count = len(row.plain_token_ids)
        if row.token_ids == row.plain_token_ids:
            yield f"prompt {number}: all {count} tokens as with none"
        else:
            yield (
                f"prompt {number}: {row.alike} of {count} tokens as with none, the first {row.alike_first} of them "
                f"before any other. With none:\n{row.plain_text}"
            )
