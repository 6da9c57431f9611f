"""The part of every worker of `thinpipe generate`: servers run their blocks step by step, the client all else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from thinpipe.codecs.spec import codec
from thinpipe.comm.backend import CPU
from thinpipe.comm.control import ACTIVITY
from thinpipe.comm.group import DisagreementError
from thinpipe.comm.membership import print_remote
from thinpipe.links.link_codec import warm_codec
from thinpipe.links.slot import Slot
from thinpipe.options import shared_values
from thinpipe.pipeline.partition import choose_cuts, cut_units, stages_of
from thinpipe.train.engines.same_files import check_same_files
from thinpipe.train.engines.units import Meta, costs_of, cut_model
from thinpipe.train.engines.world import SetupError, World
from thinpipe.train.generation.drafting import Drafter, ModelDrafter, PromptLookup, Scores
from thinpipe.train.generation.prompts import Prompt, padded, positions_of
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.generation.speculation import Speculation
from thinpipe.train.generation.wire import CONTROL_BYTES, Kind, Limits, Packing, Ring, Servers
from thinpipe.train.models.decoding import EXAMPLE, ServedBlocks, blocks_elsewhere, check_states
from thinpipe.train.models.forward import takes
from thinpipe.train.models.pretrained import PretrainedModel, quiet
from thinpipe.train.models.remote import all_loaded
from thinpipe.train.models.rollback import new_cache
from thinpipe.train.models.unit_modules import HeadUnit
from thinpipe.train.tasks.sources import identity
from thinpipe.train.versions import torch_minor
from thinpipe.version import __version__

Show = Callable[[int, str, list[int]], None]  # number, text and tokens of each, when its batch is done
MakeStreamer = Callable[[Any], Any]  # from a tokenizer: receives every token of a single prompt


@dataclass(frozen=True, kw_only=True)
class GenerationRun:
    """The result of continuing all prompts one time."""

    tokens: list[list[int]]  # the new ones of each prompt
    texts: list[str]
    seconds: float
    prefill_s: float = 0.0  # part of it, up to the first new tokens of each batch
    steps: int = 0  # after those; each adds a token to every text of a batch, or several with drafts
    wait_s: float = 0.0  # in these steps, waiting for states from the servers
    servers_s: float = 0.0  # part of it, compute time of all servers; the rest is the network
    wire_bytes: int = 0  # sent by all workers
    drafted: int = 0  # tokens
    accepted: int = 0

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_s(self) -> float:
        return self.count / max(self.seconds, 1e-9)

    @property
    def decode_s(self) -> float:
        """The time after the first new tokens of each batch."""
        return max(self.seconds - self.prefill_s, 0.0)

    @property
    def after_prefill(self) -> int:
        """The number of new tokens after the first of each text; 1 if there is none."""
        return max(self.count - len(self.tokens), 1)

    @property
    def tokens_per_step(self) -> float:
        """The mean over steps of the new tokens of all texts."""
        return self.after_prefill / max(self.steps, 1)

    @property
    def step_s(self) -> tuple[float, float, float]:
        """The time of a step on the client, on the servers and on the network."""
        steps = max(self.steps, 1)
        client_s = max(self.decode_s - self.wait_s, 0.0)
        return client_s / steps, self.servers_s / steps, max(self.wait_s - self.servers_s, 0.0) / steps


def generate(
    settings: GenerationSettings,
    world: World,
    prompts: Sequence[Prompt] | None,
    show: Show,
    make_streamer: MakeStreamer | None,  # None: a single prompt is not streamed either
) -> list[GenerationRun]:
    """Run one worker's part; the client returns the runs: with the codec and, if requested, without.

    Only the client has prompts. Raises SetupError on all workers if the run cannot start.
    """
    if world.workers > 1:
        adapter = settings.saved_adapter
        digest = world.together(lambda: None if adapter is None else adapter.digest())
        try:
            facts: dict[str, Any] = {
                "torch version": torch_minor(),
                "thinpipe version": __version__,
                "adapter": digest,
            }
            if prompts is not None:
                facts |= {"prompts": len(prompts), "longest": max(len(prompt.tokens) for prompt in prompts)}
                facts |= {"block": _block(settings)}
            facts = world.control.agree(shared_values(settings) | facts)
        except DisagreementError as error:
            raise SetupError(str(error)) from None
        check_same_files({"model": settings.model}, partial(identity, source=settings.source), world)
    ACTIVITY.note("loading the model")
    pretrained = settings.pretrained
    if world.workers == 1:
        model = world.together(lambda: _complete_model(settings, world))
        assert prompts is not None
        return [_Client(model, pretrained, settings, prompts, world.device).run(show, make_streamer)]
    part = world.together(lambda: _Part(settings, world))
    world.together(all_loaded)
    print_remote(f"worker {world.worker} holds blocks {part.blocks[0]} to {part.blocks[-1]}")
    limits = Limits.of(facts, batch_size=settings.batch_size, max_tokens=positions_of(pretrained))
    ring, runs = Ring(world, limits), list[GenerationRun]()
    for encoded in [True, False] if settings.compare else [settings.compress != "none"]:
        ring.sent_bytes, ring.busy_s = 0, [0.0, 0.0]
        if prompts is None:
            part.serve(ring)
        else:
            servers = Servers(ring, part.going, part.coming, world.device)
            client = _Client(part.cut.model, pretrained, settings, prompts, world.device, servers)
            with blocks_elsewhere(part.cut, part.blocks, servers):
                # Of two runs only the first is shown: the one that the user requested.
                shown = (lambda *_: None, None) if runs else (show, make_streamer)
                run = client.run(*shown, encoded=encoded)
            servers.quit()
            runs.append(run)
        totals = world.gather([ring.sent_bytes, ring.busy_s[1]])
        sent, busy = sum(sent for sent, _ in totals), sum(busy for _, busy in totals)
        runs[-1:] = [replace(run, wire_bytes=sent, servers_s=busy) for run in runs[-1:]]
    return runs


def _block(settings: GenerationSettings) -> int:
    """Return the number of tokens per text in a decoding step."""
    return 1 if settings.draft is None else 1 + settings.draft_tokens


def _complete_model(settings: GenerationSettings, world: World) -> nn.Module:
    model, fill = settings.built()
    new_cache(model, rewindable=settings.draft is not None)
    fill(model, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    return model.to(world.device)


class _Part:
    """The part of the model that this worker holds."""

    def __init__(self, settings: GenerationSettings, world: World) -> None:
        if world.is_client:
            settings.pretrained.check_generates()
        model, fill = settings.built()
        if world.is_client:
            new_cache(model, rewindable=settings.draft is not None)
        inputs = [Meta(EXAMPLE, torch.int64)] * (2 if takes(model, "attention_mask") else 1)
        cut = cut_model(model, inputs, fill)
        first, me = cut.units[0], world.worker
        assert isinstance(first, HeadUnit)
        self.cut, self._device = first.cut, world.device
        states = check_states(self.cut)
        traced = cut.traced(inputs, amp=False, device=CPU)
        cuts = choose_cuts(
            len(cut.units),
            world.workers,
            "client-server",
            client_layers=settings.client_layers,
            costs=costs_of(traced),
        )
        # Unit 0 is in front of block 0. The client's range is the blocks that it does not hold.
        bounds = [0, *(cut - 1 for cut in cuts)]
        self.blocks = range(bounds[1], bounds[-1]) if world.is_client else range(bounds[me], bounds[me + 1])
        modules = cut_units(cut.units, cuts)
        indices = [stages_of(worker, world.workers, "client-server") for worker in range(world.workers)]
        parts = [[modules[index] for index in each] for each in indices]
        cut.load_own(parts[me], parts=parts)
        for index in indices[me]:
            world.to_device(modules[index])
        cut.buffers_to(world.device)

        def packing(worker: int) -> Packing:
            slots = tuple(Slot(tensor.shape[2:], tensor.dtype) for tensor in states[bounds[worker + 1]])
            return Packing(states=slots, codec=codec(settings.compress), seed=settings.seed, source=worker)

        self.going, self.coming = packing(me), packing((me - 1) % world.workers)
        for slot in {*self.going.states, *self.coming.states} if settings.compress != "none" else ():
            warm_codec(self.going.codec, (*EXAMPLE, *slot.shape), slot.dtype, world.device)
        self._before_client = me == world.workers - 1

    def serve(self, ring: Ring) -> None:
        """Serve batch after batch, until the client has no more."""
        served = ServedBlocks(self.cut, self.blocks)
        while True:
            ring.post(CONTROL_BYTES)
            head, word = ring.take()
            if not self._before_client:
                ring.send(word)
            if head.kind is Kind.QUIT:
                ring.flush()
                return
            served.begin(rewindable=head.has_drafts)
            ring.post(self.coming.size(head))
            while (message := ring.take())[0].kind is not Kind.LAST:
                head, began = message[0], time.perf_counter()
                ACTIVITY.note("generating", head.number)
                ring.post(self.coming.size(head.following()))
                step = self.coming.unpack(message[1], head, self._device)
                packed = self.going.pack(head, replace(step, states=served(step)))
                ring.busy_s[head.number > 1] += time.perf_counter() - began
                ring.send(packed)
            if not self._before_client:
                ring.send(self.going.pack(message[0], None))


class _Client:
    """The client's generation loop: continues all prompts with transformers' own ``generate``."""

    def __init__(
        self,
        model: Any,
        pretrained: PretrainedModel,
        settings: GenerationSettings,
        prompts: Sequence[Prompt],
        device: torch.device,
        servers: Servers | None = None,
    ) -> None:
        self._model, self._settings, self._prompts, self._servers = model, settings, prompts, servers
        self._device = device
        self._tokenizer = pretrained.tokenizer()
        with quiet():
            self._config = pretrained.generation_config(model)
        config = self._config
        if config.eos_token_id is None:
            config.eos_token_id = self._tokenizer.eos_token_id
        ends = config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        known = config.pad_token_id, self._tokenizer.pad_token_id, *sorted(self._ends), 0
        config.pad_token_id = next(token for token in known if token is not None)
        sampling = settings.temperature is not None
        config.update(
            max_new_tokens=settings.max_new_tokens,
            max_length=None,
            do_sample=sampling,
            temperature=settings.temperature,
            top_k=(settings.top_k or 0) if sampling else None,
            top_p=(settings.top_p or 1.0) if sampling else None,
            num_beams=1,
            num_return_sequences=1,
            use_cache=True,
            cache_implementation=None,
            prefill_chunk_size=None,
            return_dict_in_generate=False,
        )
        self._draft_model, self._vocabulary = None, pretrained.vocabulary
        if (draft := settings.draft_model) is not None:
            with quiet():
                self._draft_model = draft.with_weights().to(device)

    def _drafter(self, scores: Scores, sampling: bool) -> Drafter:
        if self._draft_model is None:
            return PromptLookup()
        return ModelDrafter(self._draft_model, self._vocabulary, scores, sampling=sampling)

    def run(self, show: Show, make_streamer: MakeStreamer | None, *, encoded: bool = False) -> GenerationRun:
        """Continue all prompts: a single one is streamed, of several each is shown when its batch is done."""
        settings, prompts = self._settings, self._prompts
        size = settings.batch_size or len(prompts)
        tokens: list[list[int]] = []
        texts: list[str] = []
        seconds, clock, drafted, accepted = 0.0, _Clock(), 0, 0
        torch.manual_seed(settings.seed)
        for start in range(0, len(prompts), size):
            ACTIVITY.note("generating", start)
            batch = padded(prompts[start : start + size], self._config.pad_token_id)
            inputs = {name: tensor.to(self._device) for name, tensor in batch.items()}
            streamer = make_streamer(self._tokenizer) if make_streamer is not None and len(prompts) == 1 else None
            began = clock.begin()
            if self._servers is not None:
                self._servers.begin(encoded=encoded, block=_block(settings))
            loop: Speculation | None = None
            if settings.draft is not None:

                def on_tokens(new: list[list[int]], streamer: Any = streamer) -> None:
                    clock.tick()
                    if streamer is not None:
                        streamer.put(torch.tensor(new[0]))

                mask = inputs["attention_mask"]
                loop = Speculation(self._drafter, settings.draft_tokens, mask, on_tokens, self._servers)
            options = (
                {"streamer": streamer, "stopping_criteria": [clock]} if loop is None else {"custom_generate": loop}
            )
            with quiet(), torch.no_grad():
                rows = self._model.generate(**inputs, generation_config=self._config, **options)
            if self._servers is not None:
                self._servers.end()
            seconds += time.perf_counter() - began
            if loop is not None:
                drafted, accepted = drafted + loop.drafted, accepted + loop.accepted
            for row in rows[:, batch["input_ids"].shape[1] :].tolist():
                tokens.append(self._until_end(row))
                texts.append(self._tokenizer.decode(tokens[-1], skip_special_tokens=True))
                if streamer is None:
                    show(len(texts) - 1, texts[-1], tokens[-1])
        return GenerationRun(
            tokens=tokens,
            texts=texts,
            seconds=seconds,
            prefill_s=clock.prefill_s,
            steps=clock.steps,
            wait_s=0.0 if self._servers is None else self._servers.wait_s[1],
            drafted=drafted,
            accepted=accepted,
        )

    def _until_end(self, row: list[int]) -> list[int]:
        """Return the tokens up to the end token, without the padding after it."""
        length = next((place + 1 for place, token in enumerate(row) if token in self._ends), len(row))
        return row[:length]


class _Clock:
    """Measures when the tokens of a step are known: as a stopping criterion of transformers that never stops."""

    def __init__(self) -> None:
        self.prefill_s, self.steps = 0.0, 0

    def begin(self) -> float:
        """Start a batch and return the time."""
        self._began, self._is_first = time.perf_counter(), True
        return self._began

    def tick(self) -> None:
        """Mark the end of a step."""
        if self._is_first:
            self.prefill_s += time.perf_counter() - self._began
        self.steps += not self._is_first
        self._is_first = False

    def __call__(self, tokens: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self.tick()
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
