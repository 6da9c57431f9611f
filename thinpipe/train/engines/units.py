"""A model as units that stages are made of, with the outputs and the cost of each unit for one chunk.

Every worker computes the same result independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from thinpipe.comm.backend import CPU
from thinpipe.options import OptionError
from thinpipe.pipeline.partition import StageModule, UnitCost
from thinpipe.train.engines.loss import Deferred
from thinpipe.train.models.cut import CutModel
from thinpipe.train.models.quantized import quantize, saved_bytes
from thinpipe.train.models.remote import note_parts
from thinpipe.train.models.sequential import is_sequential, unit_names, units_of
from thinpipe.train.models.unit_modules import TailUnit, cut_into_units
from thinpipe.train.models.weights import LoadWeights


@dataclass(frozen=True, kw_only=True)
class Units:
    """A model's units in order; the same on every worker, with or without the weights."""

    model: nn.Module
    units: list[nn.Module]
    names: tuple[str, ...]
    outputs: list[Traced] | None = None  # of each for one chunk; None: found by running the units
    load: LoadWeights | None = None  # None: the model has its weights
    tail: TailUnit | None = None  # of a language model whose logits are computed by the loss
    input_names: tuple[str, ...] = ()  # of the model, for units that take some as side inputs
    quantized: bool = False  # hold frozen linear layers of blocks in 4 bits

    def side_inputs(self, names: Iterable[str], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the side inputs that units take in addition to the outputs of the previous unit."""
        named = dict(zip(self.input_names, inputs, strict=False))
        return {name: named[name] for name in names}

    def traced(self, inputs: Sequence[Meta], *, amp: bool, device: torch.device) -> list[Traced]:
        if self.outputs is None:
            return trace_units(self.units, inputs, amp=amp, device=device)
        return self.outputs

    def buffers_to(self, device: torch.device) -> None:
        """Move the model's buffers, as rotary frequencies, to the device: its code between units computes with them."""
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)

    def compile(self) -> None:
        """Compile the blocks with torch.compile: fewer and larger GPU kernels, for one shape of chunks."""
        for unit in self.blocks:
            unit.compile(dynamic=False)

    def load_own(
        self,
        modules: Iterable[StageModule],
        device: torch.device = CPU,
        parts: Iterable[Iterable[StageModule]] = (),
    ) -> None:
        """Load the values of these modules' saved tensors, and of no others; each tensor under all of its names.

        Blocks to be quantized are loaded one by one, and moved to the device. ``parts``: the modules of every worker.
        """
        if self.load is not None:
            note_parts({worker: self._names(each) for worker, each in enumerate(parts)})
        if not self.quantized:
            self._load(modules)
            return
        for unit in (unit for module in modules for unit in module.units):
            self._load([unit])
            if unit in self.blocks:
                quantize(unit.to(device))

    @property
    def blocks(self) -> list[nn.Module]:
        """The units between the first and the last, of a transformers model."""
        return self.units[1:-1]

    def saved_bytes(self, modules: Iterable[StageModule]) -> int:
        """Return the bytes that quantization will save of the weights of these modules."""
        return saved_bytes(
            unit for module in modules for unit in module.units if self.quantized and unit in self.blocks
        )

    def _names(self, modules: Iterable[nn.Module]) -> list[str]:
        own = {id(tensor) for module in modules for tensor in module.state_dict(keep_vars=True).values()}
        return [name for name, tensor in self.model.state_dict(keep_vars=True).items() if id(tensor) in own]

    def _load(self, modules: Iterable[nn.Module]) -> None:
        if self.load is None:
            return
        named = self.model.state_dict(keep_vars=True)
        self.load(self.model, self._names(modules))
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():  # of 4-bit weights no gradient can be required
                tensor.requires_grad_(named[name].requires_grad)  # loading replaced the parameter by a new one


def cut_model(
    model: nn.Module,
    inputs: Sequence[Meta],
    load: LoadWeights | None = None,
    *,
    amp: bool = False,
    names: Sequence[str] = ("input_ids", "attention_mask", "token_type_ids"),
) -> Units:
    """Return the units of a transformers model, traced by its forward on a chunk of such inputs; else ``units_of``.

    ``names``: of the inputs, unless they are images; a mask if texts are padded, and types for pairs.
    """
    if (is_sequential(model) and load is None) or not hasattr(model, "base_model_prefix"):
        known = units_of(model)
        return Units(model=model, units=known, names=unit_names(model, known), load=load)
    example = _example(inputs, names)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):  # for the dtypes of the tensors between units
        cut = CutModel(model, example)
        travelling = [meta_of(tensors) for tensors in cut.travelling(example)]
    own = [meta for metas in travelling[:-1] for meta in metas[: len(metas) - len(cut.shared)]]
    if any(meta.dtype == torch.int64 for meta in own):  # can only be tokens or derived from them
        raise ValueError(
            f"{type(model).__name__} hands its tokens from block to block, so they would travel to the servers: not cut"
        )
    *units, tail = cut_into_units(cut)
    deferred = _deferred(tail, travelling[-2], len(example["input_ids"]) if "input_ids" in example else None)
    if deferred is not None:
        travelling[-1] = travelling[-2]
    return Units(
        model=model,
        units=[*units, deferred or tail],
        names=_names(cut),
        outputs=[Traced(metas, flops) for metas, flops in zip(travelling, cut.flops, strict=True)],
        load=load,
        tail=None if deferred is None else deferred.tail,
        input_names=cut.input_names,
    )


def _deferred(tail: nn.Module, metas: Sequence[Meta], samples: int | None) -> Deferred | None:
    """Return the last unit without its logits if the model can compute logits of selected positions, else None."""
    assert isinstance(tail, TailUnit)
    of_all = all(meta.shape[:1] == (samples,) for meta in metas)  # no tensor that chunks share
    return Deferred(tail) if tail.cut.takes_positions and of_all and not tail.asks else None


def cut(model: nn.Module | Sequence[nn.Module], inputs: Mapping[str, Tensor] | None = None) -> list[nn.Module]:
    """Return a model as units, for your own stages: each takes what the one before returns, the first the inputs.

    The units of a list are its modules, those of an ``nn.Sequential`` its children. A transformers model is cut by
    tracing its forward: the part before its blocks, each block, and the part after them; ``inputs`` is an example of
    its keyword arguments, as in ``{"input_ids": ids, "attention_mask": mask}``. Units share their parameters with the
    model. A unit with names in ``asks`` takes these inputs as well: ``unit(*values, input_ids=ids)``.
    """
    if isinstance(model, list | tuple | nn.Sequential):
        units = list(model)
        wrong = [type(unit).__name__ for unit in units if not isinstance(unit, nn.Module)]
        if wrong or not units:
            raise ValueError(f"units are modules, one or more; got {wrong[0] if wrong else 'none'}")
        return units
    if not hasattr(model, "base_model_prefix"):
        raise ValueError(
            "models that can be cut are those of transformers, nn.Sequential, and lists of modules; got "
            f"{type(model).__name__}"
        )
    if inputs is None:
        raise ValueError(f"{type(model).__name__} is cut by its forward: give an example of its inputs, by name")
    return list(cut_into_units(CutModel(cast(nn.Module, model), inputs)))


def check_private(modules: Sequence[StageModule], between: Sequence[Sequence[Meta]]) -> None:
    """Raise OptionError if a stage takes side inputs but is not at an end, where the data is, or takes nothing else."""
    for index, module in enumerate(modules[1:], 1):
        if module.asks and (index < len(modules) - 1 or not between[index]):
            raise OptionError(
                f"the model uses {' and '.join(sorted(module.asks))} in layers that stage {index} has, so tokens "
                "or images would travel to the servers: leave more layers with the client ({client_layers}), or take "
                "another model"
            )


def check_shared(modules: Sequence[nn.Module], workers: int) -> None:
    """Raise OptionError if two workers would train separate copies of one parameter."""
    owner: dict[int, int] = {}
    for index, module in enumerate(modules):
        for parameter in module.parameters():
            if owner.setdefault(id(parameter), index % workers) != index % workers:
                raise OptionError(
                    "the model uses some weights in its first and in its last units (tied embeddings), so one worker "
                    "must have both: take {layout} client-server"
                )


def _example(inputs: Sequence[Meta], names: Sequence[str]) -> Mapping[str, Tensor]:
    """Return example inputs of a transformers model."""
    if inputs[0].dtype.is_floating_point:
        return {"pixel_values": torch.zeros(inputs[0].shape, dtype=inputs[0].dtype)}
    return {name: torch.ones(meta.shape, dtype=meta.dtype) for name, meta in zip(names, inputs, strict=False)}


def _names(cut: CutModel) -> tuple[str, ...]:
    paths = {id(module): path for path, module in cut.model.named_modules()}
    prefix = getattr(cut.model, "base_model_prefix", "") + "."
    return ("embeddings", *(paths[id(block)].removeprefix(prefix) for block in cut.blocks), "head")


@dataclass(frozen=True)
class Meta:
    """A tensor's shape and type, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True  # False if nothing that it is computed with is trained

    @property
    def has_gradient(self) -> bool:
        return self.trained and self.dtype.is_floating_point

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def example(self, device: torch.device, *, gradient: bool = True) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype, device=device)
        return tensor.requires_grad_(gradient and self.has_gradient)

    def zeros(self, device: torch.device, *, gradient: bool = False) -> Tensor:
        """Return zeros, an example that any unit can compute with: zero is a valid token."""
        return self.example(device, gradient=False).zero_().requires_grad_(gradient and self.has_gradient)


@dataclass(frozen=True)
class Traced:
    """The outputs and operations of one unit for one chunk."""

    outputs: tuple[Meta, ...]
    flops: int  # forward


def meta_of(tensors: Sequence[Tensor]) -> tuple[Meta, ...]:
    return tuple(Meta(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def trace_units(units: Sequence[nn.Module], inputs: Sequence[Meta], *, amp: bool, device: torch.device) -> list[Traced]:
    """Run a chunk of zeros through all units, without gradients and in evaluation mode; no state changes.

    Operations are counted rather than timed, so that all workers, and a resumed run, cut the model alike.
    """
    modes = [unit.training for unit in units]
    values: tuple[Tensor, ...] = tuple(meta.zeros(device) for meta in inputs)
    traced = []
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
            for unit in units:
                # One at a time: the full model need not fit this worker's device.
                with FlopCounterMode(display=False) as counter:
                    output = unit.to(device).eval()(*values)
                unit.cpu()
                values = output if isinstance(output, tuple) else (output,)
                traced.append(Traced(meta_of(values), counter.get_total_flops()))
    finally:
        for unit, mode in zip(units, modes, strict=True):
            unit.train(mode)
    return traced


def costs_of(traced: Sequence[Traced]) -> list[UnitCost]:
    """Return the costs that ``choose_cuts`` balances: only proportions count, so operations stand in for time."""
    return [UnitCost(max(unit.flops, 1) * 1e-6, sum(meta.bytes for meta in unit.outputs)) for unit in traced]
