"""The backend ``tls`` of torch.distributed: a process group over a mesh.

    use(mesh)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)

The store is not used; with TORCH_DIST_INIT_BARRIER=1 torch would wait in it for the others. Every group has a stream of
its own, derived from its name and ranks. In a collective each worker sends its part to all others that need it, and
computes the result itself, in the order of ranks: it is bit-identical everywhere, takes one network delay, and does not
need the peers to wait for it at the same time. An all-reduce of n workers sends the tensor n - 1 times.

Private names of torch 2.11 to 2.13: the arguments that ``register_backend(extended_api=True)`` passes to the creator.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.comm.backend import Capabilities, register_backend
from thinpipe.comm.errors import LinkError
from thinpipe.comm.secure.mesh import Mesh
from thinpipe.comm.secure.operation import Operation
from thinpipe.comm.streams import bytes_of

BACKEND = "tls"
_COLLECTIVE = -1  # the tag of all collectives of a group: they are called in the same order everywhere
_meshes: list[Mesh] = []  # of this process; one at most
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"SUM": torch.add, "MAX": torch.maximum, "MIN": torch.minimum}


def use(mesh: Mesh) -> None:
    """Register the backend; groups that are created from now on communicate over this mesh."""
    capabilities = Capabilities(tags=True, host_memory=True, short_receive=True, preconnected=True, encrypted=True)
    register_backend(BACKEND, capabilities)
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _new_group, extended_api=True, devices=["cpu"])
    _meshes[:] = [mesh]


def _new_group(options: Any, _: Any) -> MeshGroup:
    (mesh,) = _meshes
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return MeshGroup(mesh, options.group_rank, ranks, options.group_id)


class MeshWork(dist.Work):
    """The work of a process group: operations to wait for, and what is left to do then."""

    def __init__(
        self, operations: Sequence[Operation], result: Sequence[Tensor], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._operations, self._result, self._finish = operations, list(result), finish
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result; raise LinkError if a peer is lost, RuntimeError after the timeout."""
        seconds = timeout.total_seconds() if timeout else -1
        for operation in self._operations:
            if not operation.wait(seconds if seconds > 0 else -1):
                raise RuntimeError(f"not complete after {seconds} s: a peer has not sent or received its part")
            if operation.error is not None:
                raise LinkError(operation.error)
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None
        return True

    def is_completed(self) -> bool:
        return all(operation.done for operation in self._operations)

    def is_success(self) -> bool:
        return all(operation.done and operation.error is None for operation in self._operations)

    def result(self) -> list[Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result. A thread of its own completes it: callbacks may wait for other works."""
        if self._future is None:
            self._future = torch.futures.Future()
            threading.Thread(target=self._complete, args=(self._future,), name="thinpipe-future", daemon=True).start()
        return self._future

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        try:
            self.wait()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(self._result)


class MeshGroup(dist.ProcessGroup):
    """A process group of workers in a mesh."""

    def __init__(self, mesh: Mesh, rank: int, ranks: list[int], name: str) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._mesh, self._rank, self._ranks, self._name = mesh, rank, ranks, name
        self._stream = int.from_bytes(hashlib.sha256(f"{name} {ranks}".encode()).digest()[:7])
        self._others = [other for other in range(len(ranks)) if other != rank]

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:  # torch asks the C++ backend, which this group has not
        return self._name

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> MeshWork:
        (tensor,) = tensors
        return MeshWork([self._send(_memory(tensor), dst, tag)], tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> MeshWork:
        (tensor,) = tensors
        if tensor.is_contiguous():
            return MeshWork([self._receive(tensor, src, tag)], tensors)
        dense = tensor.clone(memory_format=torch.contiguous_format)  # with its values: the message may be shorter

        def finish() -> None:
            tensor.copy_(dense)

        return MeshWork([self._receive(dense, src, tag)], tensors, finish)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MeshWork:
        raise ValueError(f"the backend {BACKEND!r} receives from one worker at a time: name it (src or group_src)")

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MeshWork:
        (parts,), (tensor,) = output_tensors, input_tensors
        return self._exchange([tensor] * len(parts), parts, parts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MeshWork:
        return self._exchange([input] * len(self._ranks), self._split(output, input), [output])

    def broadcast(self, tensors: Any, opts: Any = None) -> MeshWork:  # type: ignore[override]
        root, (tensor,) = opts.rootRank, tensors
        if root != self._rank:
            return self.recv(tensors, root, _COLLECTIVE)
        memory = _memory(tensor)
        return MeshWork([self._send(memory, other, _COLLECTIVE) for other in self._others], tensors)

    def allreduce(self, tensors: Any, opts: Any = None) -> MeshWork:  # type: ignore[override]
        (tensor,) = tensors
        return self._reduce([tensor] * len(self._ranks), tensor, opts)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MeshWork:  # type: ignore[override]
        (output,), (parts,) = output_tensors, input_tensors
        return self._reduce(parts, output, opts)

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> MeshWork:
        return self._reduce(self._split(inputTensor, outputTensor), outputTensor, opts)

    def barrier(self, opts: Any = None) -> MeshWork:
        return self.allreduce([torch.zeros(0)])

    # The names in torch 2.11
    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> MeshWork:
        return self.all_gather_single(output, input)

    def _reduce_scatter_base(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> MeshWork:
        return self.reduce_scatter_single(outputTensor, inputTensor, opts)

    def _reduce(self, parts: Sequence[Tensor], output: Tensor, opts: Any) -> MeshWork:
        """Reduce the part of this rank over all workers into ``output``."""
        name = "SUM" if opts is None else opts.reduceOp.op.name
        reduction = _REDUCTIONS.get(name)
        if reduction is None:
            raise ValueError(f"the backend {BACKEND!r} reduces by {', '.join(_REDUCTIONS)}, got {name}")
        received = [torch.empty_like(output, memory_format=torch.contiguous_format) for _ in parts]

        def finish() -> None:
            total = received[0]
            for part in received[1:]:
                reduction(total, part, out=total)
            output.copy_(total)

        return self._exchange(parts, received, [output], finish)

    def _exchange(
        self, parts: Sequence[Tensor], received: Sequence[Tensor], result: Sequence[Tensor], finish: Any = None
    ) -> MeshWork:
        """Send ``parts[i]`` to rank i, and receive its part into ``received[i]``."""
        dense = [each if each.is_contiguous() else torch.empty_like(each).contiguous() for each in received]
        operations = [self._receive(dense[other], other, _COLLECTIVE) for other in self._others]
        sizes = [each.numel() * each.element_size() for each in dense]
        operations += [self._send(_memory(parts[other]), other, _COLLECTIVE) for other in self._others]
        dense[self._rank].copy_(parts[self._rank])

        def complete() -> None:
            for other, operation in zip(self._others, operations, strict=False):
                if operation.at != sizes[other]:
                    raise LinkError(f"rank {other} sent {operation.at} bytes in a collective of {sizes[other]}")
            for target, source in zip(received, dense, strict=True):
                if target is not source:
                    target.copy_(source)
            if finish is not None:
                finish()

        return MeshWork(operations, result, complete)

    def _split(self, tensor: Tensor, like: Tensor) -> list[Tensor]:
        """Return views of the tensors like ``like``, one per rank, that lie one after another in a tensor."""
        assert tensor.is_contiguous()
        assert tensor.numel() == len(self._ranks) * like.numel()
        size = like.numel()
        return [tensor.view(-1)[rank * size :][:size].view(like.shape) for rank in range(len(self._ranks))]

    def _send(self, memory: memoryview, rank: int, tag: int) -> Operation:
        return self._mesh.channel(self._ranks[rank]).send(self._stream, tag, memory)

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> Operation:
        return self._mesh.channel(self._ranks[rank]).receive(self._stream, tag, _memory(tensor))


def _memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor; a copy of them if it is not contiguous."""
    if tensor.device.type != "cpu":
        raise ValueError(f"the backend {BACKEND!r} sends from and receives into host memory, got {tensor.device}")
    return memoryview(bytes_of(tensor.detach().contiguous()).numpy())  # type: ignore[arg-type]
