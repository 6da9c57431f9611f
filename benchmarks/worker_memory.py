"""Compare the peak memory of each worker of a client-server run with the memory that its layers need.

    python benchmarks/worker_memory.py [--steps 3]

A Llama with random weights is written to a temporary folder, then trained by three workers on CPUs. Every worker first
trains a small model, so that libraries and threads are there before anything is measured, then the large one twice:

    peak            resident memory at its highest, less what was resident before the model was built
    activations     the storages that autograd has saved for the backward pass, at their most: every one counted once,
                    weights not at all
    needed          weights, gradients, optimizer state and activations of the worker's own layers

The peak is measured with every block from 64 kB on mapped by itself (mallopt), so that freed memory is returned;
the last columns have the peak with glibc's own rules, which keep freed memory, with one arena (MALLOC_ARENA_MAX).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

WORKERS, TOKENS, CHUNKS = 3, 256, 2
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
VOCABULARY = 16_000
MIB = 1 << 20


class Saved:
    """The bytes that autograd has saved at a time, and the most they ever were."""

    def __init__(self) -> None:
        self.parameters: set[int] = set()  # addresses of their storages
        self.bytes = self.most_bytes = 0
        self._users: dict[int, int] = {}  # address of a storage -> how many have saved it

    def pack(self, tensor: Tensor) -> _Held:
        return _Held(self, tensor)

    def unpack(self, held: _Held) -> Tensor:
        return held.tensor

    def add(self, storage: torch.UntypedStorage, sign: int) -> None:
        address = storage.data_ptr()
        if address in self.parameters or not storage.nbytes():
            return
        before = self._users.get(address, 0)
        self._users[address] = before + sign
        if 0 in (before, before + sign):
            self.bytes += sign * storage.nbytes()
            self.most_bytes = max(self.bytes, self.most_bytes)


class _Held:
    """One tensor that autograd has saved, until it lets go of it."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor.detach()
        saved.add(self.tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.saved.add(self.tensor.untyped_storage(), -1)


@contextmanager
def seen_optimizer(see: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Calls ``see`` with the optimizer of a run when it has been made."""
    from thinpipe.train import worker

    make = worker.make_optimizer

    def make_and_see(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters, **options)
        see(optimizer)
        return optimizer

    with mock.patch.object(worker, "make_optimizer", make_and_see):
        yield


def train(model: Path, text: Path, steps: int) -> None:
    from thinpipe.train.engines.world import join_world
    from thinpipe.train.resolve import resolve
    from thinpipe.train.running import RunOptions
    from thinpipe.train.tasks.tasks import task
    from thinpipe.train.worker import train

    given = {"task": "lm", "model": str(model), "data": str(text), "tokens": TOKENS, "batch_size": CHUNKS}
    settings = resolve(
        {**given, "chunks": CHUNKS, "workers": WORKERS, "compress": "none"}, task("lm").defaults, device="cpu"
    )
    train(task("lm"), settings, RunOptions(steps=steps), join_world("cpu", threads=1), mock.MagicMock)


def measure(folder: Path, steps: int, mapped: bool) -> dict[str, int]:
    """One worker's measurements, in bytes."""
    from thinpipe.lab.bench.meter import peak_extra_bytes
    from thinpipe.system.sizes import peak_bytes

    large, small, text = folder / "large", folder / "small", folder / "text.txt"
    train(small, text, steps)
    if not mapped:
        peak_extra_bytes(lambda: None)  # gives back what is free, and leaves glibc as it found it
        before = resident_bytes()
        train(large, text, steps)
        return {"peak": (peak_bytes(torch.device("cpu")) or 0) - before}
    peak = peak_extra_bytes(lambda: train(large, text, steps))
    assert peak is not None
    saved, optimizers = Saved(), list[torch.optim.Optimizer]()

    def see(optimizer: torch.optim.Optimizer) -> None:
        optimizers.append(optimizer)
        saved.parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters_of(optimizer)}

    with seen_optimizer(see), saved_tensors_hooks(saved.pack, saved.unpack):
        train(large, text, steps)
    weights = sum(parameter.nbytes for parameter in parameters_of(optimizers[0]))
    state = sum(value.nbytes for kept in optimizers[0].state.values() for value in kept.values())
    return {"weights": weights, "state": state, "activations": saved.most_bytes, "peak": peak}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def write(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(VOCABULARY - 2)} | {"<unk>": VOCABULARY - 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    order = torch.randint(VOCABULARY - 2, (40 * TOKENS,), generator=torch.Generator().manual_seed(0))
    (folder / "text.txt").write_text(" ".join(f"w{number}" for number in order.tolist()))
    for name, sizes in (("large", LARGE), ("small", SMALL)):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder / name)
        config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    os.environ["MALLOC_ARENA_MAX"] = "1"  # before workers are forked
    from thinpipe.launch.workers import run_workers

    with tempfile.TemporaryDirectory(prefix="thinpipe-memory-") as name:
        write(Path(name))
        found = run_workers(measure, Path(name), steps, True, workers=WORKERS)
        kept = run_workers(measure, Path(name), steps, False, workers=WORKERS)
    print("| worker | weights | gradients | optimizer | activations | needed | peak | ratio | glibc's rules | ratio |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for worker, (measured, default) in enumerate(zip(found, kept, strict=True)):
        weights, state, activations = (measured[name] for name in ("weights", "state", "activations"))
        needed = 2 * weights + state + activations
        cells = [weights, weights, state, activations, needed, measured["peak"]]
        shown = [f"{cell / MIB:.0f}" for cell in cells] + [f"{measured['peak'] / needed:.2f}"]
        shown += [f"{default['peak'] / MIB:.0f}", f"{default['peak'] / needed:.2f}"]
        print(f"| {worker}{', client' * (worker == 0)} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
