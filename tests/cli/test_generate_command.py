"""thinpipe generate as users run it: text alone on stdout, one line when a server dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import Program
from tests.processes import processes_of
from tests.scripts import LIMIT_S
from tests.train.tasks.written import write_language_model

PROMPT = "a client keeps"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_language_model(tmp_path / "model", "a client keeps the first and the last layers of a model. " * 20)
    return tmp_path / "model"


def start(*options: str) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return Program("-m", "thinpipe", "generate", *options, **pipes)


def expected(model: Path, tokens: int) -> tuple[list[int], str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    row = AutoModelForCausalLM.from_pretrained(model).generate(prompt, do_sample=False, max_new_tokens=tokens)[0]
    new = row[prompt.shape[1] :].tolist()
    return new, tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_pipe_in_and_a_pipe_out(model: Path, tmp_path: Path) -> None:
    process = start("--model", str(model), "--max-new-tokens", "12", "--json", str(tmp_path / "r.json"))
    out, err = process.communicate(PROMPT + "\n", timeout=LIMIT_S)
    assert process.returncode == 0, err
    tokens, text = expected(model, 12)
    assert out.split() == text.split()  # a streamer may hold back a space
    assert "none: 12 tokens in " in err
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (row["prompt"], row["text"], row["token_ids"]) == (PROMPT, text, tokens)
    assert row["wire_bytes_per_token"] > 2 * 32 * 4  # a state of 32 floats, there and back


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_server_that_dies_is_one_line(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 100_000}
    (model / "config.json").write_text(json.dumps(config))
    process = start("--model", str(model), "--max-new-tokens", "90000", PROMPT)
    assert process.stdout is not None
    try:
        assert process.stdout.read(1)
        os.kill(processes_of(process.pid)[-1].pid, signal.SIGKILL)  # the youngest: worker 1
        _, err = process.communicate(timeout=LIMIT_S)
    finally:
        for left in processes_of(process.pid):
            os.kill(left.pid, signal.SIGKILL)
    assert process.returncode == 1
    assert err.splitlines() == ["thinpipe: worker 1: killed by signal 9 (SIGKILL); worker 0 ended with it"]


@pytest.mark.timeout(2 * LIMIT_S + 30)
def test_several_texts_are_separated_for_people_and_programs(model: Path, tmp_path: Path) -> None:
    """Texts have empty lines themselves, and prompts may have line breaks."""
    prompts = [PROMPT, "the first\nand the last"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    options = ["--model", str(model), "--max-new-tokens", "4", "--prompts", str(tmp_path / "p.jsonl")]
    out, err = start(*options).communicate(timeout=LIMIT_S)
    lines = out.split("\n")
    assert [line for line in lines if line.startswith("===")] == [
        f"=== 1 of 2: {PROMPT}",
        "=== 2 of 2: the first and the last",
    ]
    assert re.search(
        r"\n  prefill [0-9.]+ s, then [0-9.]+ ms a step: [0-9.]+ client, [0-9.]+ servers, [0-9.]+ net", err
    )
    out, _ = start(*options, "--jsonl", "--batch-size", "1").communicate(timeout=LIMIT_S)
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["prompt"] for each in found] == prompts
    assert (found[0]["token_ids"], found[0]["text"]) == expected(model, 4)
    assert {len(each["token_ids"]) for each in found} == {4}


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_single_prompt_as_json_is_one_line(model: Path) -> None:
    process = start("--model", str(model), "--max-new-tokens", "4", "--parallel", "none", "--jsonl", PROMPT)
    out, err = process.communicate(timeout=LIMIT_S)
    tokens, text = expected(model, 4)
    assert json.loads(out) == {"prompt": PROMPT, "text": text, "token_ids": tokens}
    assert "client" not in err
