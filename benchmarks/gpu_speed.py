"""Tokens/s of `thinpipe train` on one GPU against a plain transformers loop, each in a process of its own.

    python benchmarks/gpu_speed.py TEXTS OUT.json      # a folder of texts, some 4 MB of them; eight minutes

The loop: autocast, fused AdamW, clipping, nothing else. Tokens/s are those of the steps after the first ones, in which
kernels are chosen and compiled and memory is reserved. The loop is measured before and after thinpipe's runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

TOKENS, CLIP = 512, 1.0
LLAMA = {  # of 220 million parameters
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 32_000, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
LARGE = {  # of 1.2 billion, tied
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measurement; without options it is the plain loop."""

    name: str
    batch_size: int
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    warm_up: int = 12
    steps: int = 30


ONE, TWO = {"parallel": "none"}, {"workers": 2, "chunks": 4}
ROWS = (
    Row("plain loop", 4),
    Row("plain loop", 16),
    Row("plain loop", 64),
    Row("one process", 16, {**ONE, "chunks": 1}),
    Row("one process", 64, {**ONE, "chunks": 1}, steps=20),
    Row("one process, 4 microbatches", 16, {**ONE, "chunks": 4}),
    Row("one process, 4 microbatches, --compile", 16, {**ONE, "chunks": 4, "compile": True}),
    Row("2 workers, 4 microbatches, none", 64, {**TWO, "compress": "none"}, steps=20),
    Row("2 workers, 4 microbatches, 8bit", 64, {**TWO, "compress": "8bit"}, steps=20),
    Row("2 workers, 4 microbatches, 4bit", 64, {**TWO, "compress": "4bit"}, steps=20),
    Row("2 workers, 4 microbatches, 4bit, --compile", 64, {**TWO, "compress": "4bit", "compile": True}, steps=20),
    Row("plain loop", 16),
    Row("plain loop", 64),
    Row("1.2 B, client on the CPU", 8, {**TWO, "device": "cpu,cuda"}, "large", warm_up=1, steps=3),
)


def write_models(folder: Path, texts: Path) -> None:
    """Write the configurations and a tokenizer trained on the texts."""
    from transformers import LlamaConfig

    from thinpipe.train.tasks.corpus import read_texts
    from thinpipe.train.tasks.lm import train_tokenizer

    tokenizer = train_tokenizer(read_texts(texts, None)[0], 8192)
    for name, shape in (("llama", LLAMA), ("large", LARGE)):
        LlamaConfig(**shape).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def plain(row: Row, folder: Path) -> float:
    """Return the tokens/s of a plain loop."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(folder / row.model)
    model = AutoModelForCausalLM.from_config(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = torch.randint(8192, (row.warm_up + row.steps, row.batch_size, TOKENS)).pin_memory()
    for number, batch in enumerate(batches):
        if number == row.warm_up:
            torch.cuda.synchronize()
            began = time.perf_counter()
        tokens = batch.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return row.steps * row.batch_size * TOKENS / (time.perf_counter() - began)


def trained(row: Row, folder: Path, texts: Path) -> float:
    """Return the tokens/s of a run of thinpipe."""
    from thinpipe.cli.training import run_with_restarts
    from thinpipe.train.resolve import resolve_run

    given = {"task": "lm", "model": str(folder / row.model), "pretrained": False, "data": texts, "tokens": TOKENS}
    given |= {"batch_size": row.batch_size, "lr": 1e-4, "clip_norm": CLIP, "amp": True, "epochs": 50, "device": "cuda"}
    settings, running = resolve_run(given | {"steps": row.warm_up + row.steps} | row.options)
    found = folder / "tokens_per_s"
    code = run_with_restarts(settings, running, partial(timed, row.warm_up, found))
    if code:
        raise SystemExit(code)
    return float(found.read_text())


def timed(warm_up: int, found: Path) -> Any:
    """Return a listener that writes the tokens/s after the warm-up."""
    from thinpipe.train.events import Finished, Listener, Step

    class Timer(Listener):
        seconds, samples = 0.0, 0

        def stepped(self, step: Step) -> None:
            if step.step > warm_up:
                self.seconds += step.seconds
                self.samples += step.samples

        def finished(self, end: Finished) -> None:
            found.write_text(str(self.samples * TOKENS / self.seconds))

    return Timer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--row", type=int, help="measure this row only, in this process")
    parser.add_argument("--folder", type=Path, help="of the models, for --row")
    parser.add_argument("--rows", help="numbers of rows to measure, as in 0,3")
    given = parser.parse_args()
    if given.row is not None:
        row = ROWS[given.row]
        found = trained(row, given.folder, given.texts) if row.options else plain(row, given.folder)
        given.out.write_text(str(found))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, given.texts)
        for number in map(int, given.rows.split(",")) if given.rows else range(len(ROWS)):
            row, one, began = ROWS[number], folder / "one", time.perf_counter()
            command = [sys.executable, __file__, str(given.texts), str(one), "--row", str(number)]
            done = subprocess.run([*command, "--folder", name], capture_output=True, text=True, check=False)
            took = time.perf_counter() - began
            if done.returncode:
                print(
                    f"{row.name}, batch {row.batch_size}: failed\n{done.stdout[-1500:]}{done.stderr[-3000:]}",
                    flush=True,
                )
                continue
            speed = float(one.read_text())
            rows.append({"name": row.name, "batch_size": row.batch_size, "tokens_per_s": speed, "run_s": took})
            print(f"{row.name}, batch {row.batch_size}: {speed:,.0f} tokens/s ({took:.0f} s)", flush=True)
            given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
