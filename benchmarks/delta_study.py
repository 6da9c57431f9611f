"""Fine-tune a byte language model with codecs between its layers: does delta coding win at equal bytes?

    python benchmarks/delta_study.py pretrain DIR
    python benchmarks/delta_study.py run DIR INDEX COUNT    # every COUNT-th run, for several processes on one GPU
    python benchmarks/delta_study.py table DIR

DIR/documentation.txt is the text to pre-train on (16 MB), DIR/python.txt the source code to fine-tune on (1.6 MB).
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.links.registry import link_codec
from thinpipe.links.slot import Route, Slot

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, LAYERS, HEADS, TOKENS = 512, 8, 8, 256
CUTS = (2, 6)  # client: first and last blocks; server: the middle
PRETRAIN = (2600, 64)  # steps, batch
SAMPLES, HELD, BATCH, EPOCHS = 2048, 512, 32, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor, links: list | None = None) -> Tensor:
        h = self.bytes(x) + self.positions.weight
        for index, block in enumerate(self.blocks):
            if links and index in CUTS:
                h = links[CUTS.index(index)](h)
            h = block(h)
        return self.head(self.norm(h))


class RoundTrip:
    """Both ends of a link with one tensor per step; counts the bytes."""

    def __init__(self, spec: str, source: int, target: int, seed: int) -> None:
        self.ends = [link_codec(spec) for _ in range(2)]
        for end, sends in zip(self.ends, (True, False), strict=True):
            end.attach(Route(source, target, sends, DEVICE, None))
            end.seed = seed
        self.steps, self.bytes, self.training = 0, 0, True

    def __call__(self, x: Tensor) -> Tensor:
        x = x.detach().float().contiguous()
        if self.steps == 0:
            for end in self.ends:
                end.configure([Slot.of(x)], 1)
        self.steps += self.training
        for end in self.ends:
            end.begin_step(self.steps, self.training)
        form, out = self.ends[0].wire_format(0, 0), torch.empty_like(x)
        self.bytes += form.wire_bytes * self.training
        if form.raw:
            return x
        wire = torch.empty(form.wire_bytes, dtype=torch.uint8, device=x.device)
        self.ends[0].encode(0, 0, x, wire)
        self.ends[1].decode(0, 0, wire, out)
        return out


class Delta:
    """Changes against a copy in float16, through any link codec; first passes and evaluations through another."""

    def __init__(self, change: str, first: str, source: int, target: int, seed: int) -> None:
        self.change, self.first = RoundTrip(change, source, target, seed), RoundTrip(first, source, target, seed)
        self.copies: Tensor | None = None
        self.known = torch.zeros(SAMPLES, dtype=torch.bool)
        self.samples, self.training = torch.empty(0), True

    @property
    def bytes(self) -> int:
        return self.change.bytes + self.first.bytes

    def __call__(self, x: Tensor) -> Tensor:
        x = x.detach().float()
        self.first.training = self.training
        if not self.training:
            return self.first(x)
        if self.copies is None:
            self.copies = torch.zeros(SAMPLES, *x.shape[1:], dtype=torch.float16, device=x.device)
        rows = self.samples.to(x.device)
        if bool(self.known[self.samples].all()):
            copy = self.copies[rows].float()
            value = copy + self.change(x - copy)
        else:
            value = self.first(x)
        self.copies[rows] = value.half()
        self.known[self.samples] = True
        return value


def tensor_codec(spec: str, source: int, target: int, seed: int) -> RoundTrip | Delta:
    if spec.startswith("delta("):
        change, first = spec[6:-1].split(",first=")
        return Delta(change, first, source, target, seed)
    return RoundTrip(spec, source, target, seed)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, link):
        ctx.link = link
        return link.forward_codec(x).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.link.backward_codec(gradient).to(gradient.dtype), None


class Link:
    def __init__(self, number: int, forward: str, backward: str, seed: int) -> None:
        self.forward_codec = tensor_codec(forward, number, number + 1, seed)
        self.backward_codec = tensor_codec(backward, number + 1, number, seed)

    def __call__(self, x: Tensor) -> Tensor:
        return _Cross.apply(x, self)


def texts(folder: Path, name: str) -> Tensor:
    return torch.frombuffer(bytearray((folder / f"{name}.txt").read_bytes()), dtype=torch.uint8)


def loss_of(model: Model, batch: Tensor, links: list | None = None) -> Tensor:
    batch = batch.to(DEVICE).long()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        logits = model(batch[:, :-1], links)
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def pretrain(folder: Path) -> None:
    torch.manual_seed(0)
    steps, batch = PRETRAIN
    data, model = texts(folder, "documentation"), Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    began = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        starts = torch.randint(len(data) - TOKENS - 1, (batch,))
        loss = loss_of(model, torch.stack([data[start : start + TOKENS + 1] for start in starts]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0 or step == steps - 1:
            print(f"pretrain {step}: {loss.item():.3f} nats, {time.perf_counter() - began:.0f} s", flush=True)
    torch.save(model.state_dict(), folder / "base.pt")


def samples_of(folder: Path) -> tuple[Tensor, Tensor]:
    data = texts(folder, "python")
    windows = data[: len(data) // (TOKENS + 1) * (TOKENS + 1)].view(-1, TOKENS + 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))
    assert len(windows) >= SAMPLES + HELD, len(windows)
    return windows[order[HELD : HELD + SAMPLES]], windows[order[:HELD]]


# (activations, gradients): groups of about equal bytes over the run, first passes included
RUNS = [
    ("none", "none"),
    ("none", "gauss:2+unbiased"),
    # about 3 bits of activations
    ("gauss:3", "gauss:2+unbiased"),
    ("axes:3+now", "gauss:2+unbiased"),
    ("delta(gauss:2,first=tile:8)", "gauss:2+unbiased"),
    ("delta(axes:2+now,first=tile:8)", "gauss:2+unbiased"),
    # about 2 bits
    ("gauss:2", "gauss:2+unbiased"),
    ("axes:2+now", "gauss:2+unbiased"),
    ("delta(gauss:1,first=gauss:6)", "gauss:2+unbiased"),
    ("delta(axes:1+now,first=gauss:6)", "gauss:2+unbiased"),
    # about 1.2 bits
    ("axes:1.2+now", "gauss:1+unbiased"),
    ("delta(axes:0.5+now,first=gauss:4)", "gauss:1+unbiased"),
]


def run_one(folder: Path, mode: str, forward: str, backward: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    train, held = samples_of(folder)
    model = Model().to(DEVICE)
    model.load_state_dict(torch.load(folder / "base.pt", map_location=DEVICE))
    if mode == "lora":
        model.requires_grad_(False)
        for block in model.blocks:
            for name in ("qkv", "out", "up", "down"):
                setattr(block, name, LoRA(getattr(block, name)).to(DEVICE))
    parameters = [each for each in model.parameters() if each.requires_grad]
    peak = 2e-4 if mode == "full" else 1e-3
    optimizer = torch.optim.AdamW(parameters, lr=peak, weight_decay=0.01)
    links = [Link(number, forward, backward, seed) for number in range(2)]
    per_epoch, values = SAMPLES // BATCH, BATCH * TOKENS * WIDTH
    steps, began, nats, by_epoch, sent = per_epoch * EPOCHS, time.perf_counter(), [], [], 0
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for position in range(per_epoch):
            step = epoch * per_epoch + position
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
            rows = order[position * BATCH : (position + 1) * BATCH]
            for link in links:
                link.forward_codec.samples = rows
            loss_of(model, train[rows], links).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total = sum(link.forward_codec.bytes for link in links)
        by_epoch.append(round((total - sent) * 8 / (per_epoch * values * 2), 3))
        sent = total
        with torch.no_grad():
            # Of the model alone: what is kept of training. Codecs in evaluations would add their own error.
            nats.append(sum(loss_of(model, batch).item() * len(batch) for batch in held.split(64)) / len(held))
    return {
        "mode": mode, "forward": forward, "backward": backward, "seed": seed, "nats": nats,
        "forward_bits": sum(by_epoch) / EPOCHS, "forward_bits_by_epoch": by_epoch,
        "backward_bits": sum(link.backward_codec.bytes for link in links) * 8 / (steps * values * 2),
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def run(folder: Path, index: int, count: int) -> None:
    todo = [(mode, *pair, seed) for seed in range(3) for mode in ("lora", "full") for pair in RUNS]
    with (folder / f"runs_{index}.jsonl").open("w") as file:
        for each in todo[index::count]:
            found = run_one(folder, *each)
            print(json.dumps(found), file=file, flush=True)
            print(*each, f"{found['forward_bits']:.2f} bits", *(f"{x:.4f}" for x in found["nats"]), flush=True)


def table(folder: Path) -> None:
    rows = [json.loads(line) for path in sorted(folder.glob("runs*.jsonl")) for line in path.open()]
    for mode in ("lora", "full"):
        base = {row["seed"]: row["nats"] for row in rows if row["mode"] == mode and row["forward"] == row["backward"]}
        print(f"\n{mode}: uncompressed, last epoch {[round(each[-1], 4) for each in base.values()]}, "
              f"best {[round(min(each), 4) for each in base.values()]}")  # fmt: skip
        print("| activations | gradients | bits | by epoch | nats added, last epoch: mean (each seed) | best epoch |")
        print("|---|---|--:|---|---|--:|")
        for forward, backward in RUNS:
            mine = [r for r in rows if (r["mode"], r["forward"], r["backward"]) == (mode, forward, backward)]
            last = [r["nats"][-1] - base[r["seed"]][-1] for r in mine if r["seed"] in base]
            best = [min(r["nats"]) - min(base[r["seed"]]) for r in mine if r["seed"] in base]
            if last:
                print(
                    f"| `{forward}` | `{backward}` | {mine[0]['forward_bits']:.2f} | {mine[0]['forward_bits_by_epoch']}"
                    f" | {sum(last) / len(last):+.4f} ({', '.join(f'{x:+.4f}' for x in last)})"
                    f" | {sum(best) / len(best):+.4f} |"
                )


if __name__ == "__main__":
    commands = {"pretrain": pretrain, "run": run, "table": table}
    commands[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
