"""Any transformers model as pipeline units: the code before its blocks, each block, and the code after them.

Only values that the following units need and cannot compute travel between units: hidden states, rarely more, and the
shared inputs (the attention mask). Every worker computes the other arguments of a block (its mask, rotary embeddings,
window) by running the model's own forward with symbolic tensors (``symbolic``). A ``Value`` is identified by its
origin. Model inputs do not travel: a unit that uses one (``asks``) receives it as a keyword argument, so the worker
that holds that unit needs the inputs. A value that a run needs and does not have stays symbolic and raises an error; it
is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from thinpipe.train.models.blocks import SHARED, UncuttableError, device_of, in_order
from thinpipe.train.models.flops import flop_counter
from thinpipe.train.models.forward import run_until, shapes_returned, takes, without_cache, without_values
from thinpipe.train.models.symbolic import SymbolicValueError, is_symbolic, symbolic_like
from thinpipe.train.models.weights import zeros_for_meta


class Value(NamedTuple):
    """A tensor by its origin: a leaf of a block's arguments or of its return value, or an input of the model.

    An argument has the block that is first called with it. Sorted values are in the order in which they are sent.
    """

    kind: Literal["argument", "input", "output"]
    block: int  # 0 for an input
    leaf: int  # the number of an input


Values = dict[Value, Tensor]


@dataclass
class Call:
    """The arguments of a block, as leaves; a leaf that is a value is replaced when the value is available."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    values: dict[int, Value]  # leaf -> its value

    def filled(self, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [values[self.values[i]] if i in self.values else leaf for i, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass
class Returned:
    """The return value of a block, without values."""

    leaves: list[Any]
    spec: pytree.TreeSpec

    def filled(self, block: int, values: Values, device: torch.device) -> Any:
        leaves = [
            values.get(Value("output", block, i), symbolic_like(leaf, device)) if isinstance(leaf, Tensor) else leaf
            for i, leaf in enumerate(self.leaves)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass
class Trace:
    """One forward with symbolic tensors: the arguments and return values of all blocks."""

    calls: list[Call] = field(default_factory=list)
    returns: list[Returned] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)  # per block


class CutModel:
    """A model, its blocks in call order, and the values that travel between them."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        """``inputs`` is an example with the right names, types and shapes."""
        self.model = model
        without_cache(model)
        self.input_names = tuple(inputs)
        self.shared = tuple(name for name in inputs if name in SHARED)
        self.shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in inputs.items()]
        self.blocks = in_order(model, inputs)
        self._kept: dict[Any, tuple[dict[str, Tensor], Trace]] = {}
        # Some classifiers have the argument too, with logits of texts.
        generates: Any = getattr(model, "can_generate", None)
        self.takes_positions = takes(model, "logits_to_keep") and generates is not None and bool(generates())
        with zeros_for_meta(model):
            self.example = trace = self.trace(inputs)
            self.from_head = self._from_head(trace, inputs)
            self.live, self.side_inputs = self._liveness(trace, inputs)
            parts, self.in_no_unit = self._parts()
            self.parts, self.flops, self.logits = self._used(parts, inputs)

    # Runs

    def inputs_without_values(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = device_of(inputs.values())
        return {name: each if name in self.shared else symbolic_like(each, device) for name, each in inputs.items()}

    def trace(self, inputs: Mapping[str, Tensor]) -> Trace:
        """Return the arguments of all blocks for these inputs; of the inputs, only values of shared ones are used."""
        key = (device_of(inputs.values()), *((name, tuple(tensor.shape)) for name, tensor in inputs.items()))
        shared = {name: inputs[name] for name in self.shared}
        kept = self._kept.get(key)
        if kept is not None and all(_same(kept[0][name], shared[name]) for name in shared):
            return kept[1]
        trace = self._trace(inputs, kept[1].returns if kept else None)
        self._kept[key] = ({name: tensor.clone() for name, tensor in shared.items()}, trace)
        return trace

    def _trace(
        self, inputs: Mapping[str, Tensor], returns: list[Returned] | None, options: Mapping[str, Any] | None = None
    ) -> Trace:
        trace, device = Trace(), device_of(inputs.values())
        hidden = self.inputs_without_values(inputs)
        # Keyed by identity; keeping the tensor keeps its id from being reused.
        made: dict[int, tuple[Value, Tensor]] = {
            id(tensor): (Value("input", 0, i), tensor) for i, (name, tensor) in enumerate(hidden.items())
        }

        def on_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if number != len(trace.calls):
                raise UncuttableError(f"blocks are called in another order: block {number} after {len(trace.calls)}")
            leaves, spec = pytree.tree_flatten((args, kwargs))
            values: dict[int, Value] = {}
            for i, leaf in enumerate(leaves):
                if is_symbolic(leaf) or isinstance(leaf, nn.Parameter):
                    values[i] = made.setdefault(id(leaf), (Value("argument", number, i), leaf))[0]
            trace.calls.append(Call(leaves, spec, values))
            if returns is None:
                result, flops = self._shapes_returned(number, args, kwargs)
                trace.flops.append(flops)
                trace.returns.append(Returned(*pytree.tree_flatten(result)))
            else:
                trace.returns.append(returns[number])
                result = returns[number].filled(number, {}, device)
            for i, leaf in enumerate(pytree.tree_leaves(result)):
                if is_symbolic(leaf):
                    made[id(leaf)] = (Value("output", number, i), leaf)
            return result

        last = len(self.blocks) - 1
        given: dict[str, Any] = {**hidden, **(options or {})}
        with without_values(device):
            args, kwargs = run_until(self.model, self.blocks, given, on_call, last)
            on_call(last, args, kwargs)
        return trace

    def calls(self, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[Call]:
        """Return the arguments of all blocks if the model is called with further options: a cache, positions.

        The inputs may have other numbers of rows and tokens than the example.
        """
        return self._trace(inputs, self.returned(*inputs[self.input_names[0]].shape), options).calls

    def returned(self, rows: int, tokens: int) -> list[Returned]:
        """Return the example's block return values, with token states resized to ``rows`` x ``tokens``."""

        def resized(leaf: Any) -> Any:
            is_state = isinstance(leaf, Tensor) and leaf.shape[:2] == self.shapes[0][1]
            return torch.empty((rows, tokens, *leaf.shape[2:]), dtype=leaf.dtype, device="meta") if is_state else leaf

        return [Returned([resized(leaf) for leaf in each.leaves], each.spec) for each in self.example.returns]

    def _shapes_returned(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Return what a block returns and its FLOPs, which are counted for the example only."""
        if self._kept:
            return shapes_returned(self.blocks[number], args, kwargs), 0
        with flop_counter() as counter:
            return shapes_returned(self.blocks[number], args, kwargs), counter.get_total_flops()

    def between(
        self, values: Values, inputs: Mapping[str, Tensor], until: int | None, positions: slice | None = None
    ) -> Any:
        """Run the model's code up to a block's call (return leaves) or to its end (return logits), given these values.

        With ``positions``, compute the logits of these positions only, if the model supports that
        (``takes_positions``).
        """
        trace = self.trace(inputs)
        device = device_of(values.values())
        first = min((block for kind, block, _ in values if kind == "output"), default=-1)
        known = {name: values[value] for i, name in enumerate(inputs) if (value := Value("input", 0, i)) in values}
        with without_values(device) as with_weights:

            def on_call(number: int, args: Any, kwargs: Any) -> Any:
                if number == first:
                    with_weights()  # the weights of the code before it belong to other units
                return trace.returns[number].filled(number, values, device)

            given: dict[str, Any] = self.inputs_without_values(inputs) | known
            if positions is not None:
                given["logits_to_keep"] = positions
            result = run_until(self.model, self.blocks, given, on_call, until)
        return result if until is None else pytree.tree_leaves(result)

    def from_inputs(self, wanted: Iterable[Value], inputs: Mapping[str, Tensor]) -> Values:
        """Return those of the wanted block arguments that do not depend on any block."""
        trace, device = self.trace(inputs), device_of(inputs.values())
        found: Values = {}

        def collect(number: int, leaves: list[Any]) -> None:
            for value in wanted:
                if value.block == number and not is_symbolic(leaves[value.leaf]):
                    found[value] = leaves[value.leaf]

        def on_call(number: int, args: Any, kwargs: Any) -> Any:
            collect(number, pytree.tree_leaves((args, kwargs)))
            return trace.returns[number].filled(number, {}, device)

        last = max((value.block for value in wanted), default=0)
        if last == 0:  # no block comes before, and the head has all weights: nothing is symbolic
            collect(last, pytree.tree_leaves(run_until(self.model, self.blocks, inputs, on_call, last)))
            return found
        with without_values(device) as with_weights:
            with_weights()
            collect(last, pytree.tree_leaves(run_until(self.model, self.blocks, inputs, on_call, last)))
        return found

    # Assignment of modules to units

    def _parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the largest modules without a block inside, and modules that are in no unit: no weights, or a block.

        The former are the largest so that all their submodules are included.
        """
        blocks = {id(block) for block in self.blocks}
        inside = {id(module) for module in self.model.modules() if blocks & {id(each) for each in module.modules()}}
        containers = [module for module in self.model.modules() if id(module) in inside - blocks]
        parts = [child for container in containers for child in container.children() if id(child) not in inside]
        parts += [_own(container) for container in containers if container._parameters]
        bare = [part for part in parts if not part.state_dict()]
        return parts, [*containers, *(module for part in bare for module in part.modules())]

    def _used(
        self, parts: Sequence[nn.Module], inputs: Mapping[str, Tensor]
    ) -> tuple[list[list[nn.Module]], list[int], Tensor]:
        """Return the parts that the code before each block and after the last one uses, each unit's FLOPs, and logits.

        The logits are symbolic.
        """
        owner = {id(tensor): part for part in parts for tensor in (*part.parameters(), *part.buffers())}
        used: list[dict[int, nn.Module]] = [{} for _ in range(len(self.blocks) + 1)]
        segment = 0

        def on_tensor(tensor: Tensor) -> None:
            if id(tensor) in owner:
                used[segment].setdefault(id(owner[id(tensor)]), owner[id(tensor)])

        trace, device = self.trace(inputs), device_of(inputs.values())

        def on_call(number: int, args: Any, kwargs: Any) -> Any:
            nonlocal segment
            segment = number + 1
            flops.append(counter.get_total_flops())
            return trace.returns[number].filled(number, needed, device)

        # The code that computes the logits may use values of inputs.
        given = self.inputs_without_values(inputs) | {name: inputs[name] for name in self.side_inputs[-1]}
        needed = {value: zeros for value, zeros in _returned(trace, device).items() if value in self.live[-1]}
        flops = [0]  # cumulative: at each block's call, and at the end
        with without_values(device, on_tensor), flop_counter() as counter:
            logits = run_until(self.model, self.blocks, given, on_call, None)
        head, *glue, tail = (after - before for before, after in pairwise([*flops, counter.get_total_flops()]))
        blocks_flops = [own + more for own, more in zip(trace.flops, [*glue, 0], strict=True)]
        return [list(modules.values()) for modules in used], [head, *blocks_flops, tail], logits

    # Values that travel

    def _from_head(self, trace: Trace, inputs: Mapping[str, Tensor]) -> set[Value]:
        """Return arguments of later blocks that the head can compute: per-layer embeddings, a decoder's input."""
        called = {value for call in trace.calls for value in call.values.values()}
        wanted = {value for value in called if value.kind == "argument" and value.block > 0}
        with torch.no_grad():
            return set(self.from_inputs(wanted, inputs)) if wanted else set()

    def _liveness(
        self, trace: Trace, inputs: Mapping[str, Tensor]
    ) -> tuple[list[tuple[Value, ...]], list[tuple[str, ...]]]:
        """Return the values that travel across each boundary, and for every unit the inputs that it uses."""
        count = len(self.blocks)
        live: list[set[Value]] = [set() for _ in range(count + 1)]
        live[count] = needed = self._needs(trace, inputs, None)
        used = [needed]  # per unit, from the last to the first
        for boundary in range(count - 1, -1, -1):
            later = {value for value in live[boundary + 1] | needed if self._made_at(value) <= boundary}
            called = set(trace.calls[boundary].values.values())
            live[boundary] = later | called
            used.append(called if boundary == count - 1 else called | needed)
            needed = self._needs(trace, inputs, boundary) if self.is_glued(boundary, trace) else set()
        travel = [tuple(sorted(value for value in values if value.kind != "input")) for values in live]
        used.append(set())  # of the head, which receives all inputs
        names = [[self.input_names[i] for kind, _, i in sorted(values) if kind == "input"] for values in used]
        return travel, [tuple(each) for each in reversed(names)]

    def _made_at(self, value: Value) -> int:
        """Return the first boundary at which a value is available."""
        if value.kind == "output":
            return value.block + 1
        return 0 if value in self.from_head else value.block

    def _needs(self, trace: Trace, inputs: Mapping[str, Tensor], until: int | None) -> set[Value]:
        """Return the values and inputs that the code before a block needs (None: the code that computes the logits)."""
        last = len(self.blocks) if until is None else until
        device = device_of(inputs.values())
        returned = {value: zeros for value, zeros in _returned(trace, device).items() if value.block < last}
        given: Values = {
            Value("input", 0, i): tensor for i, (name, tensor) in enumerate(inputs.items()) if name not in self.shared
        }
        # Most often the output of the preceding block is enough, and the larger sets need not be tried.
        before = {value: tensor for value, tensor in returned.items() if value.block == last - 1}
        for values in (before, before | given, returned | given):
            if self._is_enough(values, trace, inputs, until):
                for value in list(values):
                    fewer = {each: tensor for each, tensor in values.items() if each != value}
                    values = fewer if self._is_enough(fewer, trace, inputs, until) else values
                return set(values)
        where = "what comes after the last block" if until is None else f"what block {until} is given"
        raise UncuttableError(f"{where} depends on more than inputs and what blocks return")

    def _is_enough(self, values: Values, trace: Trace, inputs: Mapping[str, Tensor], until: int | None) -> bool:
        last = slice(-1, None) if until is None and self.takes_positions else None
        try:
            with torch.no_grad():
                found = self.between(values, inputs, until, last)
        except (SymbolicValueError, NotImplementedError):
            return False
        if until is None:
            return not is_symbolic(found)
        return not any(is_symbolic(found[i]) for i in self.glue_arguments(until, trace))

    def glue_arguments(self, number: int, trace: Trace) -> dict[int, Value]:
        """Return the leaves of a block's arguments that the code between it and the preceding block computes."""
        values = trace.calls[number].values.items()
        return {i: value for i, value in values if value[:2] == ("argument", number) and value not in self.from_head}

    def is_glued(self, number: int, trace: Trace) -> bool:
        """Return True if the model computes something between this block and the preceding one."""
        return number > 0 and bool(self.glue_arguments(number, trace))

    def travelling(self, inputs: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """Return what each unit returns for inputs of the example's shapes: tensors on the meta device."""
        trace = self.trace(inputs)
        shared = [inputs[name] for name in self.shared]

        def like(value: Value) -> Tensor:
            held = trace.calls if value.kind == "argument" else trace.returns
            leaf: Tensor = held[value.block].leaves[value.leaf]
            return leaf

        return [[*map(like, live), *shared] for live in self.live] + [[self.logits]]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and torch.equal(one, other)


def _own(container: nn.Module) -> nn.Module:
    """Return a module with the parameters that a container holds itself, sharing its dictionary."""
    own = nn.Module()
    own._parameters = container._parameters
    return own


def _returned(trace: Trace, device: torch.device) -> Values:
    """Return all return values of blocks, as zeros."""
    return {
        Value("output", block, i): torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        for block, returned in enumerate(trace.returns)
        for i, leaf in enumerate(returned.leaves)
        if is_symbolic(leaf)
    }
