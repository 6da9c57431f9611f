"""Speculative decoding: a block of drafted tokens is verified in one forward, and the first of them are accepted.

    text ... t        drafts a b c d        block  t a b c d   ->  logits after each
                                            accepted a b, c rejected: e comes from the logits after b
    text ... t a b e                        the caches of c and d are removed with the next block

Greedy texts are those of plain decoding. Sampled ones have the same distribution: a token drawn from q is accepted with
probability min(1, p / q), otherwise another is drawn from max(p - q, 0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinpipe.train.generation.drafting import Draft, Drafter, Scores, Texts
from thinpipe.train.generation.wire import Servers
from thinpipe.train.models.rollback import CachedTexts

_AHEAD = 0.8  # of the time that the last block took: for drafting while the next is on its way


def choose(draft: Draft, scores: Tensor, *, sampling: bool) -> list[int]:
    """Return the accepted tokens of a draft and the one after them, from the scores [1 + drafted, vocabulary]."""
    if not sampling:
        chosen: list[int] = scores[: len(draft.tokens) + 1].argmax(-1).tolist()
        right = next((i for i, pair in enumerate(zip(chosen, draft.tokens, strict=False)) if pair[0] != pair[1]), -1)
        return chosen if right < 0 else chosen[: right + 1]
    wanted = scores.softmax(-1).cpu()
    for place, (token, drawn_from) in enumerate(zip(draft.tokens, draft.chances, strict=True)):
        chance = 1.0 if drawn_from is None else float(drawn_from[token])
        if float(torch.rand(())) * chance < float(wanted[place, token]):
            continue
        rest = wanted[place].clone()
        if drawn_from is None:
            rest[token] = 0
        else:
            rest[: len(drawn_from)] -= drawn_from  # the draft's model may know fewer tokens
            rest.clamp_(min=0)
        return [*draft.tokens[:place], int(torch.multinomial(rest, 1))]
    return [*draft.tokens, int(torch.multinomial(wanted[len(draft.tokens)], 1))]


class Speculation:
    """The decoding loop of a batch, for ``generate(custom_generate=...)``, which prepares processors and criteria."""

    def __init__(
        self,
        make_drafter: Callable[[Scores, bool], Drafter],
        count: int,
        mask: Tensor,
        on_tokens: Callable[[list[list[int]]], None],
        servers: Servers | None,
    ) -> None:
        """``count``: drafted tokens per block; ``mask``: of the prompts; ``on_tokens`` receives new tokens by text."""
        self._make_drafter, self._count, self._mask = make_drafter, count, mask
        self._on_tokens, self._servers = on_tokens, servers
        self.drafted, self.accepted = 0, 0

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **options: Any,
    ) -> Tensor:
        """Return prompts and what follows, padded at the end."""
        scores, sampling = _scorer(logits_processor), bool(generation_config.do_sample)
        texts, device = input_ids.tolist(), input_ids.device
        drafter, cached = self._make_drafter(scores, sampling), CachedTexts(model)
        drafts, done = [Draft() for _ in texts], [False] * len(texts)
        logits = cached.begin(input_ids, self._mask)
        drafter.begin(texts, self._mask)
        while True:
            chosen: list[list[int]] = []
            for text, draft, is_done, each in zip(texts, drafts, done, logits, strict=True):
                found = [] if is_done else self._choose(text, draft, each, scores, sampling=sampling)
                chosen.append(found)
            rejected = [logits.shape[1] - len(new) for new in chosen]
            for number, new in enumerate(chosen):
                for place, token in enumerate(new):
                    texts[number].append(token)
                    if bool(stopping_criteria(torch.tensor([texts[number]], device=device), None)):
                        done[number] = True
                        del new[place + 1 :]
                        break
            self._on_tokens(chosen)
            if all(done):
                return _padded(texts, int(generation_config.pad_token_id), device)
            drafts = drafter.draft(texts, self._count)
            if self._servers is not None:
                self._servers.rejected = tuple(rejected)
                seconds = _AHEAD * self._servers.last_wait_s
                self._servers.meanwhile = partial(drafter.go_on, 2 * self._count + 1, seconds)
            logits = cached.extend(_block(texts, drafts, 1 + self._count, device), rejected)

    def _choose(self, text: list[int], draft: Draft, logits: Tensor, scores: Scores, *, sampling: bool) -> list[int]:
        """Return the next tokens of a text, from the logits after its last token and after each drafted one."""
        count = len(draft.tokens)
        chosen = choose(draft, scores(text + draft.tokens, logits[: 1 + count]), sampling=sampling)
        self.drafted += count
        self.accepted += len(chosen) - 1
        return chosen


def _scorer(processors: Any) -> Scores:
    """Return a function that applies transformers' processors to the logits after the last n tokens of a text."""

    def scores(text: list[int], logits: Tensor) -> Tensor:
        logits = logits.float()
        if not processors:
            return logits
        ends = range(len(text) - len(logits) + 1, len(text) + 1)
        before = (torch.tensor([text[:end]], device=logits.device) for end in ends)
        return torch.cat([processors(each, row[None]) for each, row in zip(before, logits, strict=True)])

    return scores


def _block(texts: Texts, drafts: Sequence[Draft], size: int, device: torch.device) -> Tensor:
    """Return the last token of each text and its draft, filled up to ``size``."""
    rows = [[text[-1], *draft.tokens] for text, draft in zip(texts, drafts, strict=True)]
    return torch.tensor([row + row[-1:] * (size - len(row)) for row in rows], device=device)


def _padded(texts: Texts, padding: int, device: torch.device) -> Tensor:
    longest = max(map(len, texts))
    return torch.tensor([text + [padding] * (longest - len(text)) for text in texts], device=device)
