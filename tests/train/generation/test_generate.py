"""Texts of a model on several workers are those of transformers' own generate, token for token."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.train.tasks.written import write_language_model
from tests.train.toy import world_in
from thinpipe.codecs.spec import codec
from thinpipe.train.generation.prompts import Prompt
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.generation.worker import GenerationRun, generate
from thinpipe.train.models.tiny import shrunken

F32 = torch.float32
NEW, WINDOW, POSITIONS = 12, 4, 128
NEVER = 1 << 20  # no token: texts have all tokens they may have
# Type -> what its default configuration lacks.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "gpt2": {},
    "gemma2": {},
    "mixtral": {"sliding_window": WINDOW},
}
PROMPTS = [[11, 12, 13], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30], [40]]  # the shorter ones are padded


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_language_model(folder, "a client keeps the first and the last layers of a model. " * 20)
    return folder


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Path) -> Path:
    """A small model whose texts do not repeat themselves at once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = shrunken(AutoConfig.for_model(request.param, **KINDS[request.param]))
    config.max_position_embeddings = POSITIONS
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" not in name and "wte" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = NEVER, 0
    model.save_pretrained(tmp_path)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    return tmp_path


def work(group: dist.ProcessGroup, folder: Path, options: dict[str, Any]) -> list[GenerationRun]:
    world = world_in(group)
    settings = GenerationSettings(model=str(folder), workers=world.workers, max_new_tokens=NEW, device="cpu", **options)
    prompts = [Prompt("", tokens) for tokens in PROMPTS] if world.is_client else None
    return generate(settings, world, prompts, lambda number, text, tokens: None, lambda tokenizer: None)


def wanted(
    folder: Path, adapter: Path | None = None, prompts: list[list[int]] = PROMPTS, **options: Any
) -> list[list[int]]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    model = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    rows: list[list[int]] = model.generate(input_ids=tokens, attention_mask=mask, **given)[:, longest:].tolist()
    end = model.generation_config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@pytest.mark.parametrize(
    ("folder", "counts"),
    [("llama", (2, 3)), ("qwen2", (2,)), ("gpt2", (2,)), ("gemma2", (3,)), ("mixtral", (3,))],
    indirect=["folder"],
    ids=KINDS,
)
def test_greedy_texts_are_those_of_transformers(pool: Pool, folder: Path, counts: tuple[int, ...]) -> None:
    expected = wanted(folder)
    assert set(map(len, expected)) == {NEW}
    assert len({token for row in expected for token in row}) > 8
    for workers in counts:
        (run,), *servers = pool.run(work, workers, folder, {})
        assert run.tokens == expected
        assert servers == [[]] * (workers - 1)  # they have no texts
        assert run.steps == NEW - 1
        assert 0 < run.servers_s < run.seconds
        assert 0 < run.prefill_s < run.prefill_s + run.wait_s < run.seconds
        client, on_servers, _ = run.step_s
        assert client * run.steps == pytest.approx(run.seconds - run.prefill_s - run.wait_s)
        assert on_servers * run.steps == pytest.approx(run.servers_s)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_sampled_texts_end_like_those_of_transformers(pool: Pool, folder: Path) -> None:
    chosen = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    torch.manual_seed(3)
    first, *_ = wanted(folder, do_sample=True, **chosen)
    assert first != wanted(folder)[0]
    config = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": first[5]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    (run,), _, _ = pool.run(work, 3, folder, {"seed": 3, **chosen})
    torch.manual_seed(3)
    assert run.tokens == wanted(folder, do_sample=True, **chosen)
    assert len(run.tokens[0]) < NEW


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_codec_is_held_against_none(pool: Pool, folder: Path) -> None:
    """The client has blocks of its own; the third prompt is a batch of its own."""
    options = {"compress": "kmeans:1", "compare": True, "client_layers": (2, 2), "batch_size": 2}
    (coded, plain), _ = pool.run(work, 2, folder, options)
    assert plain.tokens == wanted(folder)
    assert coded.tokens != plain.tokens
    # The long prompts are encoded, there and back; what one token brings has 512 bytes, and stays as it is.
    shape = 2, max(map(len, PROMPTS)), 64
    assert plain.wire_bytes - coded.wire_bytes == 2 * (4 * math.prod(shape) - codec("kmeans:1").wire_bytes(shape, F32))


@pytest.mark.parametrize(
    ("folder", "workers", "draft"),
    [
        ("llama", 2, "prompt"),
        ("llama", 3, "changed"),
        ("qwen2", 2, "changed"),
        ("gpt2", 2, "changed"),
        ("gemma2", 3, "changed"),
        ("mixtral", 2, "same"),
        ("llama", 2, "same"),
    ],
    indirect=["folder"],
)
def test_drafts_do_not_change_greedy_texts(
    pool: Pool, folder: Path, tmp_path_factory: pytest.TempPathFactory, workers: int, draft: str
) -> None:
    """A changed copy of the model drafts some tokens that are accepted, and others that are not, by text."""
    expected = wanted(folder)
    drafter = {"prompt": "prompt", "same": str(folder)}.get(draft) or changed(folder, tmp_path_factory.mktemp("draft"))
    (run,), *_ = pool.run(work, workers, folder, {"draft": drafter, "draft_tokens": 3})
    assert run.tokens == expected
    if draft == "changed":
        assert 0 < run.accepted < run.drafted
    if draft == "same":
        assert run.accepted == run.drafted
        assert run.steps == math.ceil((NEW - 1) / 4)


def changed(folder: Path, target: Path) -> str:
    """Write a copy of a model with a little noise."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    shutil.copytree(folder, target, dirs_exist_ok=True)
    model.save_pretrained(target)
    return str(target)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_texts_end_with_drafts_where_they_end_without(pool: Pool, folder: Path) -> None:
    """An end token, and a penalty for repeated tokens, are handled by transformers as without drafts."""
    first = wanted(folder)[0]
    changes = {"eos_token_id": first[5], "repetition_penalty": 1.5}
    config = json.loads((folder / "generation_config.json").read_text()) | changes
    (folder / "generation_config.json").write_text(json.dumps(config))
    (run,), _ = pool.run(work, 2, folder, {"draft": str(folder), "draft_tokens": 5, "batch_size": 2})
    assert run.tokens[:2] == wanted(folder, prompts=PROMPTS[:2])
    assert run.tokens[2:] == wanted(folder, prompts=PROMPTS[2:])
    assert len({len(each) for each in run.tokens}) > 1


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_sampled_texts_do_not_depend_on_time(pool: Pool, folder: Path) -> None:
    options = {"draft": str(folder), "temperature": 0.9, "top_k": 20, "seed": 3, "compress": "tile:8"}
    runs = [pool.run(work, 2, folder, options)[0][0] for _ in range(2)]
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].tokens != wanted(folder)
