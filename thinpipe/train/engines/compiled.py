"""torch.compile for runs of blocks: fewer and larger GPU kernels, and one call from Python for several blocks.

Small microbatches wait for the launches of kernels. Evaluations, whose batches have other shapes, run blocks as they
are; so do blocks that exchange more than hidden states with their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.options import OptionError
from thinpipe.pipeline.partition import StageModule
from thinpipe.train.models.cut import Trace, Value
from thinpipe.train.models.unit_modules import BlockUnit, HeadUnit, TailUnit

LONGEST = 6  # blocks in one graph, which is compiled once for all runs of the same structure


def compile_blocks(modules: Iterable[nn.Module]) -> None:
    """Compile the blocks of stages for training; raise OptionError if a stage has blocks of which none can be."""
    for module in modules:
        assert isinstance(module, StageModule)
        calls: list[Callable[..., Any]] = []
        run: list[BlockUnit] = []
        for unit in module.units:
            if run and (len(run) == LONGEST or not _is_plain(unit)):
                calls.append(CompiledRun(run))
                run = []
            if _is_plain(unit):
                assert isinstance(unit, BlockUnit)
                run.append(unit)
            else:
                calls.append(unit)
        module.calls = [*calls, CompiledRun(run)] if run else calls
        ends = [isinstance(unit, HeadUnit | TailUnit) or hasattr(unit, "tail") for unit in module.units]
        if not all(ends) and not any(isinstance(call, CompiledRun) for call in module.calls):
            raise OptionError(
                "{compile} compiles transformer blocks that pass hidden states only, and this model has none: leave "
                "it out"
            )


def _is_plain(unit: nn.Module) -> bool:
    """Return True for a block that takes hidden states as its first argument, and returns them first."""
    if not isinstance(unit, BlockUnit) or unit.asks:
        return False
    cut, number = unit.cut, unit.number
    (taken, given), call = cut.live[number : number + 2], cut.example.calls[number]
    glued = number + 1 < len(cut.blocks) and cut.is_glued(number + 1, cut.example)
    if len(taken) != 1 or given != (Value("output", number, 0),) or glued:
        return False
    args, _ = call.filled({taken[0]: torch.empty(0)}) if set(call.values.values()) == set(taken) else ((), {})
    return bool(args) and list(call.values) == [0]


class _Blocks(nn.Module):
    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, states: Tensor, arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> Tensor:
        for block, (args, kwargs) in zip(self.blocks, arguments, strict=True):
            returned = block(states, *args, **kwargs)
            states = returned[0] if isinstance(returned, tuple) else returned
        return states


class CompiledRun:
    """Consecutive blocks of a stage as one compiled call; no module, because the blocks are modules of the stage."""

    def __init__(self, units: Sequence[BlockUnit]) -> None:
        self._units = tuple(units)
        self._compiled = torch.compile(_Blocks(unit.block for unit in units), dynamic=False)
        self._trace: Trace | None = None
        self._arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            for unit in self._units:
                tensors = unit(*tensors)
            return tensors
        first = self._units[0]
        _, inputs = first.split(first.number, tensors, {})
        trace = first.cut.trace(inputs)
        if trace is not self._trace:
            self._trace, self._arguments = trace, [_others(trace, unit) for unit in self._units]
        return (self._compiled(tensors[0], self._arguments), *tensors[1:])


def _others(trace: Trace, unit: BlockUnit) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block after its first, the hidden states."""
    call = trace.calls[unit.number]
    args, kwargs = call.filled(dict.fromkeys(call.values.values(), torch.empty(0)))
    return args[1:], kwargs
