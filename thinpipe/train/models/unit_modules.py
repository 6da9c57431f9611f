"""The units of a cut model: modules that each take what the preceding one returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from thinpipe.train.models.blocks import UncuttableError
from thinpipe.train.models.chain import Chain, chain_of, key_of, recorded
from thinpipe.train.models.cut import CutModel, Value, Values
from thinpipe.train.models.symbolic import is_symbolic, symbolic

_WIDTHS = 64  # multiples of positions: gathered states have few shapes


def cut_into_units(cut: CutModel) -> list[_Unit]:
    return [HeadUnit(cut), *(BlockUnit(cut, number) for number in range(len(cut.blocks))), TailUnit(cut)]


class _Unit(nn.Module):
    def __init__(self, cut: CutModel, number: int, segment: int) -> None:
        super().__init__()
        self._cut = [cut]  # in a list, so that the full model is not a submodule of the unit
        self.asks = cut.side_inputs[number]  # names of the inputs that are passed to it by keyword
        self.parts = nn.ModuleList(cut.parts[segment])

    def train(self, mode: bool = True) -> _Unit:
        """Set the mode, also of modules without weights that no unit holds and the model's code uses: dropout."""
        for module in self.cut.in_no_unit:
            module.training = mode
        return super().train(mode)

    @property
    def cut(self) -> CutModel:
        return self._cut[0]

    def split(
        self, boundary: int, tensors: Sequence[Tensor], given: Mapping[str, Tensor]
    ) -> tuple[Values, dict[str, Tensor]]:
        """Return the values received or given as side inputs, and the model inputs; only shared ones have values."""
        live = self.cut.live[boundary]
        values = dict(zip(live, tensors, strict=False))
        values |= {Value("input", 0, self.cut.input_names.index(name)): given[name] for name in self.asks}
        shared = dict(zip(self.cut.shared, tensors[len(live) :], strict=True))
        return values, self._inputs(shared, next(iter(values.values())))

    def _inputs(self, shared: dict[str, Tensor], states: Tensor) -> dict[str, Tensor]:
        inputs = {}
        for name, shape, dtype in self.cut.shapes:
            if name in shared:
                inputs[name] = shared[name]
            elif shared:
                inputs[name] = symbolic(next(iter(shared.values())).shape, dtype, states.device)
            else:
                inputs[name] = symbolic((states.shape[0], *shape[1:]), dtype, states.device)
        return inputs


class HeadUnit(_Unit):
    """The model's code up to its first block."""

    def __init__(self, cut: CutModel) -> None:
        super().__init__(cut, 0, 0)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        cut = self.cut
        inputs = dict(zip(cut.input_names, tensors, strict=True))
        called = {value for value in cut.trace(inputs).calls[0].values.values() if value.kind == "argument"}
        values = cut.from_inputs(called | cut.from_head, inputs)
        return (*(values[value] for value in cut.live[0]), *(inputs[name] for name in cut.shared))


class BlockUnit(_Unit):
    """One block, and the model's code between it and the next one."""

    def __init__(self, cut: CutModel, number: int) -> None:
        glued = number + 1 < len(cut.blocks)
        super().__init__(cut, number + 1, number + 1 if glued else 0)
        if not glued:
            self.parts = nn.ModuleList()  # the code after the last block belongs to the tail
        self.number = number
        self.block = cut.blocks[number]

    def forward(self, *tensors: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
        cut, number = self.cut, self.number
        values, inputs = self.split(number, tensors, given)
        trace = cut.trace(inputs)
        args, kwargs = trace.calls[number].filled(values)
        returned = pytree.tree_leaves(self.block(*args, **kwargs))
        values |= {Value("output", number, i): leaf for i, leaf in enumerate(returned) if isinstance(leaf, Tensor)}
        following = number + 1
        if following < len(cut.blocks) and cut.is_glued(following, trace):
            leaves = cut.between(values, inputs, following)
            values |= {value: leaves[i] for i, value in cut.glue_arguments(following, trace).items()}
        shared = tensors[len(cut.live[number]) :]
        return (*(_known(values, value, following) for value in cut.live[following]), *shared)


class TailUnit(_Unit):
    """The model's code after its last block, which returns logits."""

    def __init__(self, cut: CutModel) -> None:
        super().__init__(cut, len(cut.blocks) + 1, len(cut.blocks))
        self._chains: dict[Any, Chain | None] = {}

    @property
    def is_pointwise(self) -> bool:
        """True if the logits of a position depend on the states of this position only."""
        states, given = self.cut.live[-1], self.cut.side_inputs[-1]
        return self.cut.takes_positions and len(states) == 1 and not given

    def forward(self, *tensors: Tensor, **given: Tensor) -> Tensor:
        return self.logits(tensors, given=given)

    def logits(
        self,
        tensors: Sequence[Tensor],
        positions: slice | Tensor | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the logits of all positions of a text, or of these; a tensor counts positions over all texts."""
        if isinstance(positions, Tensor):
            return self._gathered(tensors, positions)
        if len(self.cut.live[-1]) > 1 or self.asks:
            return self._run(tensors, positions, given or {})
        states = tensors[0]
        if positions is not None and positions.indices(states.shape[1]) == (0, states.shape[1], 1):
            positions = None
        key = key_of(states, positions, self.training)
        if key not in self._chains:
            version = states._version
            with recorded(self.parts) as calls:
                logits = self._run(tensors, positions, {})
            self._chains[key] = chain_of(calls, states, version, positions, logits)
            return logits
        chain = self._chains[key]
        return self._run(tensors, positions, {}) if chain is None else chain(states, positions)

    def _gathered(self, tensors: Sequence[Tensor], positions: Tensor) -> Tensor:
        """Return the logits of these positions, [1, n, vocabulary]: their states gathered in as few texts as they need.

        The text length stays, because models reshape states by it; logits are those of the first ``width`` positions.
        """
        states, *shared = tensors
        count, length = len(positions), states.shape[1]
        texts = -(-count // length)
        width = min(length, -(-count // texts // _WIDTHS) * _WIDTHS)
        places = positions.new_zeros(texts, length)
        places[:, :width] = functional.pad(positions, (0, texts * width - count)).view(texts, width)
        gathered = states.flatten(0, 1)[places]
        logits = self.logits((gathered, *(each[:texts] for each in shared)), slice(0, width))
        return logits.flatten(0, 1)[:count][None]

    def _run(self, tensors: Sequence[Tensor], positions: slice | None, given: Mapping[str, Tensor]) -> Tensor:
        values, inputs = self.split(len(self.cut.blocks), tensors, given)
        logits: Tensor = self.cut.between(values, inputs, None, positions)
        return logits


def _known(values: Values, value: Value, block: int) -> Tensor:
    found = values.get(value)
    if found is None or is_symbolic(found):
        raise UncuttableError(f"what block {block} is given depends on more than the block before it")
    return found
