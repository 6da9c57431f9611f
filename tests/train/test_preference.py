"""Direct preference optimization: against a loop of one process, over resumes, and on pairs with a known answer."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pool import Pool
from tests.train.tasks.written import write_language_model
from tests.train.toy import Recorder, saved_model, settings_for, world_in
from thinpipe.train import worker
from thinpipe.train.batches import SampleOrder
from thinpipe.train.checkpoints.folder import load, newest
from thinpipe.train.evaluation import evaluate_on_worker
from thinpipe.train.running import RunOptions
from thinpipe.train.tasks.task import Source
from thinpipe.train.tasks.tasks import task

PREFERENCE = task("preference")
LETTERS, PAIRS, BATCH, STEPS, BETA = "abcdefgh", 140, 6, 20, 0.5
TEXT = " ".join(LETTERS) * 40
GIVEN: dict[str, Any] = {
    **{"batch_size": BATCH, "chunks": 3, "compress": "none", "lr": 3e-3, "lr_schedule": "constant", "warmup": 0.0},
    **{"weight_decay": 0.0, "clip_norm": 1.0, "dpo_beta": BETA},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and pairs: an answer with a letter of the prompt is preferred to one without."""
    folder = tmp_path_factory.mktemp("preference")
    write_language_model(folder / "model", TEXT)
    drawn = random.Random(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(PAIRS):
            first, second = drawn.sample(LETTERS, 2)
            prompt = " ".join([first] * drawn.randint(1, 4)) + " ?"
            chosen, rejected = (f" {each}" * drawn.randint(1, 3) for each in (first, second))
            file.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
    return folder


def trained(group: Any, home: Path, running: RunOptions, given: dict[str, Any]) -> Recorder:
    ears, there = Recorder(), {"model": str(home / "model"), "data": home / "pairs.jsonl"}
    settings = settings_for(PREFERENCE, group, **{**GIVEN, **there, **given})
    worker.train(PREFERENCE, settings, running, world_in(group), lambda: ears)
    return ears


def own_loop(home: Path) -> tuple[list[float], dict[str, Tensor]]:
    """DPO without thinpipe: one process, one text at a time. Losses, and the weights after the last step."""
    model, tokenizer = (kind.from_pretrained(home / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    reference, rows = copy.deepcopy(model).eval(), map(json.loads, (home / "pairs.jsonl").read_text().splitlines())
    pairs = [row for number, row in enumerate(rows) if number % 20]
    optimizer = torch.optim.AdamW(model.parameters(), lr=GIVEN["lr"], weight_decay=0.0)

    def log_prob(of: Any, prompt: str, answer: str) -> Tensor:
        made = tokenizer(prompt + answer, return_offsets_mapping=True)
        ids = torch.tensor([[*made["input_ids"], tokenizer.eos_token_id]])
        counts = torch.tensor([end > len(prompt) for _, end in made["offset_mapping"]] + [True])
        of_tokens = functional.log_softmax(of(ids).logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]
        return of_tokens[counts[1:]].sum()

    losses, order = [], SampleOrder(len(pairs), step_samples=BATCH, seed=0)
    for step in range(STEPS):
        margins = []
        for number in order.step(0, step).tolist():
            row = pairs[number]
            gains = []
            for name in ("chosen", "rejected"):
                with torch.no_grad():
                    before = log_prob(reference, row["prompt"], row[name])
                gains.append(log_prob(model, row["prompt"], row[name]) - before)
            margins.append(gains[0] - gains[1])
        loss = -functional.logsigmoid(BETA * torch.stack(margins)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def test_three_workers_compute_what_a_loop_of_one_process_does(pool: Pool, home: Path, tmp_path: Path) -> None:
    losses, weights = own_loop(home)
    ears = pool.run(trained, 3, home, RunOptions(save=tmp_path, steps=STEPS), {})[0]
    assert [step.loss for step in ears.steps] == pytest.approx(losses, abs=1e-5)
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[-1] < 0.6
    for name, tensor in saved_model(tmp_path).items():
        torch.testing.assert_close(tensor, weights[name.removeprefix("model/")], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("codec", ["none", "8bit", "4bit"])
def test_accuracy_on_held_out_pairs_rises(pool: Pool, home: Path, codec: str) -> None:
    given = {"compress": codec, "epochs": 8, "lora": 8, "lr": 0.04, "batch_size": 24}
    ears = pool.run(trained, 3, home, RunOptions(), given)[0]
    accuracies = [epoch.validation_metric for epoch in ears.epochs]
    assert accuracies[-1] >= 6 / 7, accuracies
    assert ears.epochs[-1].validation_loss < 0.5
    assert ears.epochs[-1].bits_per_byte is None


@pytest.mark.parametrize("save_local", [False, True])
def test_a_resumed_run_keeps_its_reference(pool: Pool, home: Path, tmp_path: Path, save_local: bool) -> None:
    given = {"lora": 4, "batch_size": 24}
    straight = pool.run(trained, 3, home, RunOptions(steps=8), given)[0]
    running = RunOptions(save=tmp_path, steps=4, save_local=save_local)
    pool.run(trained, 3, home, running, given)
    saved = load(newest(tmp_path), lambda key: key.startswith("reference/"))
    assert saved["reference/log_probs"].shape == (PAIRS, 2)
    assert bool((saved["reference/log_probs"] < 0).all())
    running = RunOptions(save=tmp_path, resume=tmp_path, steps=8, save_local=save_local)
    rest = pool.run(trained, 3, home, running, given)[0]
    assert [step.loss for step in rest.steps] == [step.loss for step in straight.steps[4:]]
    assert rest.end.parameters_sha256 == straight.end.parameters_sha256


def evaluated(group: Any, home: Path, run: Path | None, data: Path) -> Any:
    given = {"model": str(home / "model"), "data": data, "lora": 4}
    settings = settings_for(PREFERENCE, group, **{**GIVEN, **given})
    try:
        return evaluate_on_worker(world_in(group), settings, run, None, "validation", PREFERENCE).found
    except ValueError as error:
        return str(error)


def test_a_run_is_evaluated_against_its_reference(pool: Pool, home: Path, tmp_path: Path) -> None:
    end = pool.run(trained, 3, home, RunOptions(save=tmp_path / "run", steps=8), {"lora": 4, "lr": 0.01})[0].end
    found = pool.run(evaluated, 3, home, tmp_path / "run", home / "pairs.jsonl")[0]
    assert (found.loss, found.metric) == (pytest.approx(end.validation_loss, abs=1e-6), end.metric)
    assert abs(found.loss - 0.6931) > 0.01  # that of a model that is its own reference
    assert "name a run" in pool.run(evaluated, 3, home, None, home / "pairs.jsonl")[0]
    lines = (home / "pairs.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(reversed(lines)))
    problems = pool.run(evaluated, 3, home, tmp_path / "run", tmp_path / "other.jsonl")
    assert all("is of the pairs that it was trained and validated with: the " in each for each in problems)


def test_logits_in_pieces_give_the_same_loss(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"parallel": "none", "chunks": 3}
    at_once = trained(None, home, RunOptions(steps=3), ways)
    monkeypatch.setattr(
        "thinpipe.train.engines.loss.Loss._pieces",
        lambda self, labels: iter(
            slice(start, min(start + 5, labels.shape[1])) for start in range(0, labels.shape[1], 5)
        ),
    )
    in_pieces = trained(None, home, RunOptions(steps=3), ways)
    assert [step.loss for step in in_pieces.steps] == pytest.approx([step.loss for step in at_once.steps], abs=1e-6)


def test_messages_are_rendered_and_both_sides_are_there(home: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a"}]
    row = {
        "prompt": said,
        "chosen": [{"role": "assistant", "content": "c"}],
        "rejected": [{"role": "assistant", "content": "d"}],
    }
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    (tmp_path / "template.jinja").write_text(
        "{% for message in messages %}{{ message.role[0] }} {{ message.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    template = tmp_path / "template.jinja"
    source = Source(model=str(home / "model"), data=tmp_path / "pairs.jsonl", tokens=50, chat_template=template)
    PREFERENCE.preflight(source)
    data, shape = PREFERENCE.load(source)
    batch = data.train.batch(torch.tensor([0, 1]))
    begin = int(batch.labels[0, -2])
    assert shape.packed
    assert batch.labels[:, -1].tolist() == [0, 1]
    assert data.validation.batch(torch.tensor([0])).labels[:, -1].tolist() == [2]
    assert batch.inputs[1][0, begin] == 0  # the rejected text has its own positions
    tokens, labels = batch.inputs[0][0], batch.labels[0, :-2]
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    sides = [tokenizer.decode(side[side >= 0].tolist()) for side in (labels[:begin], labels[begin:])]
    assert [side.replace("</s>", "").strip()[-1:] for side in sides] == ["c", "d"]
    assert len(tokens) == len(labels)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, 'line 1: a pair is {"prompt": "..."'),
        ({"prompt": "a", "chosen": "b", "rejected": ["c"]}, "line 1: prompt, chosen and rejected are texts, or all"),
        ({"prompt": "a", "chosen": " ", "rejected": "c"}, "line 1: chosen: its completion is empty"),
        (
            {"prompt": [], "chosen": [{"role": "user", "content": "x"}], "rejected": []},
            "line 1: chosen: it has no answer",
        ),
        ([1], "line 1: a pair is"),
    ],
)
def test_bad_pairs_are_one_line(home: Path, tmp_path: Path, row: Any, message: str) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError) as raised:  # noqa: PT011, the message is compared below
        PREFERENCE.preflight(Source(model=str(home / "model"), data=tmp_path / "pairs.jsonl"))
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "pairs.jsonl"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layout": "linear", "client_layers": None}, "computes its loss on the client"),
        ({"parallel": "data", "chunks": 1}, "computes its loss on the client"),
    ],
)
def test_the_loss_is_on_the_client(home: Path, given: dict[str, Any], message: str) -> None:
    from thinpipe.train.data import check_objective
    from thinpipe.train.resolve import resolve

    settings = resolve({"task": "preference", "workers": 2, **given}, PREFERENCE.defaults, device="cpu")
    with pytest.raises(ValueError, match=message):
        check_objective(PREFERENCE, settings)
    with pytest.raises(ValueError, match="dpo_beta is of the task preference"):
        check_objective(task("chat"), resolve({"task": "chat", "dpo_beta": 0.1}, task("chat").defaults, device="cpu"))
