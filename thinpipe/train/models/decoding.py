"""Text generation with a cut model: transformers' own ``generate`` runs on the client, the blocks run on servers.

       client                                           servers

  (1)  generate calls the model's forward
  (2)  the first remote block is called:
       the travelling values are sent         ------>  (3)  the model's forward, run with symbolic tokens, gives the
                                                            blocks' other arguments: masks, positions, the cache
       and the results received               <------  (4)  the blocks compute
  (5)  the last remote block returns them, and generate chooses a token

Every worker has a transformers cache with all layers. The layers of its own blocks hold keys and values; the others
hold placeholders that only count tokens, from which the model's code derives the lengths of masks and positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from thinpipe.train.models.blocks import UncuttableError
from thinpipe.train.models.cut import CutModel, Returned, Value, Values
from thinpipe.train.models.forward import intercepted, takes
from thinpipe.train.models.rollback import cache_name, new_cache, roll_back, without_last
from thinpipe.train.models.symbolic import symbolic
from thinpipe.train.models.tiny import ORDINARY_TOKENS
from thinpipe.train.models.verify import drop_weights

EXAMPLE = 2, 8  # texts and tokens of the example that is used to cut a model


@dataclass(frozen=True, kw_only=True)
class Step:
    """The input of one forward: the new tokens of each text."""

    states: tuple[Tensor, ...]  # [texts, tokens, ...] each
    mask: Tensor | None = None  # [texts, tokens]: 0 for padding; None: the model has no such argument
    positions: Tensor | None = None  # [texts, tokens]; None: the model computes them
    rejected: tuple[int, ...] | None = None  # by text: its last tokens that leave the caches before; None: no drafts


Elsewhere = Callable[[Step], tuple[Tensor, ...]]


def check_states(cut: CutModel) -> list[list[Tensor]]:
    """Return the tensors that travel before every block and after the last one, for the example, on the meta device.

    Raises UncuttableError unless they are token states that blocks alone compute.
    """
    found = []
    for boundary, (values, tensors) in enumerate(zip(cut.live, cut.travelling(_example(cut.model)), strict=False)):
        states = tensors[: len(values)]
        if boundary < len(cut.blocks) and cut.side_inputs[boundary + 1]:  # of the units; the head is the first
            problem = f"gives its tokens to block {boundary}, and they stay with the client"
        elif any(kind == "argument" and block > 0 for kind, block, _ in values):
            problem = f"computes something in front of block {boundary}, which generating would leave out"
        elif any(state.shape[:2] != EXAMPLE or not state.is_floating_point() for state in states):
            problem = f"hands more than states of tokens to block {boundary}"
        else:
            found.append(states)
            continue
        raise UncuttableError(f"{type(cut.model).__name__} does not generate in pieces: it {problem}")
    return found


def _example(model: nn.Module) -> dict[str, Tensor]:
    names = ["input_ids", *(["attention_mask"] if takes(model, "attention_mask") else [])]
    return {name: torch.ones(EXAMPLE, dtype=torch.int64) for name in names}


def _cut(model: nn.Module) -> CutModel:
    cut = CutModel(model, _example(model))
    check_states(cut)
    return cut


def count_tokens(cache: Any, block: nn.Module, states: Tensor) -> None:
    """Add the tokens of ``states`` to the cache layers of a remote block, as placeholders."""
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    rows, tokens = states.shape[:2]
    numbers = {getattr(module, name, None) for module in block.modules() for name in ("layer_idx", "layer_id")}
    for layer in sorted(number for number in numbers if isinstance(number, int)):
        kind = cache.layers[layer] if layer < len(cache.layers) else None
        if isinstance(kind, LinearAttentionCacheLayerMixin):
            cache.update_conv_state(states.new_zeros(rows, 1, 1), layer)
        if kind is None or hasattr(kind, "update"):
            cache.update(states.new_zeros(rows, 1, tokens, 1), states.new_zeros(rows, 1, tokens, 1), layer)


class ServedBlocks:
    """(3) and (4): consecutive blocks of a model whose other weights are on other workers."""

    def __init__(self, cut: CutModel, blocks: range) -> None:
        self.cut, self.blocks = cut, blocks
        self.begin()

    def begin(self, *, rewindable: bool = False) -> None:
        """Start a new batch of texts with an empty cache."""
        self._cache = new_cache(self.cut.model, rewindable=rewindable)
        self._mask: Tensor | None = None

    @torch.no_grad()
    def __call__(self, step: Step) -> tuple[Tensor, ...]:
        cut, (rows, tokens) = self.cut, step.states[0].shape[:2]
        inputs = {cut.input_names[0]: symbolic((rows, tokens), torch.int64, step.states[0].device)}
        options: dict[str, Any] = {cache_name(cut.model): self._cache, "use_cache": True}
        if step.rejected is not None:
            roll_back(self._cache, step.rejected)
            self._mask = None if self._mask is None else without_last(self._mask, step.rejected)
        if step.mask is not None:
            self._mask = step.mask if self._mask is None else torch.cat([self._mask, step.mask], dim=1)
            options["attention_mask"] = self._mask
        if step.positions is not None:
            options["position_ids"] = step.positions
        calls = cut.calls(inputs, options)
        values: Values = dict(zip(cut.live[self.blocks.start], step.states, strict=True))
        for number in self.blocks:
            args, kwargs = calls[number].filled(values)
            leaves = pytree.tree_leaves(cut.blocks[number](*args, **kwargs))
            values |= {Value("output", number, i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        for number, block in enumerate(cut.blocks):
            if number not in self.blocks:
                count_tokens(self._cache, block, step.states[0])
        return tuple(values[value] for value in cut.live[self.blocks.stop])


@contextmanager
def blocks_elsewhere(cut: CutModel, blocks: range, elsewhere: Elsewhere) -> Iterator[None]:
    """(1), (2) and (5): run the model with these blocks replaced by ``elsewhere``."""
    given: dict[str, Any] = {}  # arguments of the forward in progress
    values: Values = {}
    returns: list[Returned] = []

    def on_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.clear()
        given.update(kwargs)
        values.clear()

    def note(kind: Literal["argument", "output"], number: int, tree: Any) -> None:
        leaves = enumerate(pytree.tree_leaves(tree))
        values.update({Value(kind, number, i): leaf for i, leaf in leaves if isinstance(leaf, Tensor)})

    def hand_over() -> None:
        states = tuple(values[value] for value in cut.live[blocks.start])
        rows, tokens = states[0].shape[:2]
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        step = Step(states=states, mask=None if mask is None else mask[:, -tokens:], positions=positions)
        values.update(zip(cut.live[blocks.stop], elsewhere(step), strict=True))
        returns[:] = cut.returned(rows, tokens)
        for number in blocks:
            for i, leaf in enumerate(returns[number].leaves):
                if isinstance(leaf, Tensor):  # used nowhere else; expanded zeros take no memory
                    zero = torch.zeros((), dtype=leaf.dtype, device=states[0].device)
                    values.setdefault(Value("output", number, i), zero.expand(leaf.shape))

    def on_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = cut.blocks[number]
        if number not in blocks:
            note("argument", number, (args, kwargs))
            result = type(block).forward(block, *args, **kwargs)
            note("output", number, result)
            return result
        if number == blocks.start:
            note("argument", number, (args, kwargs))
            hand_over()
        states = values[cut.live[blocks.start][0]]
        count_tokens(given[cache_name(cut.model)], block, states)
        return returns[number].filled(number, values, states.device)

    hook = cut.model.register_forward_pre_hook(on_forward, with_kwargs=True)
    try:
        with intercepted(cut.blocks, on_call):
            yield
    finally:
        hook.remove()


def check_generates(model: nn.Module) -> None:
    """Raise UncuttableError unless a small model generates the same with its blocks on two servers as uncut."""
    torch.manual_seed(0)
    tokens = torch.randint(ORDINARY_TOKENS.start, ORDINARY_TOKENS.stop, (2, 6))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    name = type(model).__name__
    try:
        wanted = _logits(copy.deepcopy(model), tokens, mask)
        cut = _cut(copy.deepcopy(model))
        count = len(cut.blocks)
        bounds = [0, (count + 1) // 2, count]  # so that servers exist with blocks before theirs and with blocks after
        servers = []
        for blocks in map(range, bounds, bounds[1:]):
            alone = _cut(copy.deepcopy(model))
            kept = {id(each) for number in blocks for each in alone.blocks[number].parameters()}
            drop_weights(alone.model, kept)
            servers.append(ServedBlocks(alone, blocks))
        in_blocks = {id(each) for block in cut.blocks for each in block.parameters()}
        drop_weights(cut.model, {id(each) for each in cut.model.parameters()} - in_blocks)

        def elsewhere(step: Step) -> tuple[Tensor, ...]:
            for server in servers:
                step = replace(step, states=server(step))
            return step.states

        with blocks_elsewhere(cut, range(count), elsewhere):
            found = _logits(cut.model, tokens, mask)
    except UncuttableError:
        raise
    except Exception as error:
        raise UncuttableError(f"{name} does not generate in pieces: {type(error).__name__}: {error}") from error
    if not torch.equal(found, wanted):
        step = int((found != wanted).flatten(1).any(1).nonzero()[0]) + 1 if found.shape == wanted.shape else 1
        raise UncuttableError(f"{name} does not generate in pieces what it does uncut: token {step} differs")


def _logits(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return logits [token, text, vocabulary] of a few tokens: more than a small model's window and first forward."""
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True, use_cache=True)
    config.eos_token_id, config.pad_token_id = None, 0
    with torch.no_grad():
        return torch.stack(model.generate(tokens, attention_mask=mask, generation_config=config).logits)
