"""The loss of a batch: the same however it is cut, by its labelled positions alone."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from thinpipe.train.engines.loss import Loss, count_labelled
from thinpipe.train.engines.units import Meta, cut_model
from thinpipe.train.tasks.task import IGNORED

CPU = torch.device("cpu")


def loss_in_chunks(logits: Tensor, labels: Tensor, chunks: int) -> tuple[Tensor, float]:
    loss = Loss(None, device=CPU)
    loss.begin(labels, chunks)
    losses = [loss(part, target) for part, target in zip(logits.chunk(chunks), labels.chunk(chunks), strict=True)]
    return torch.stack(losses).mean(), loss.correct()


def test_padding_does_not_count_and_every_label_counts_alike() -> None:
    """Chunks with few labels weigh less, one without any nothing."""
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 6, 5), torch.randint(5, (4, 6))
    labels[0, 1:], labels[2:] = IGNORED, IGNORED
    assert count_labelled(labels) == 7
    full = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    right = int((logits.argmax(-1) == labels).sum())
    for chunks in (1, 2, 4):
        loss, correct = loss_in_chunks(logits, labels, chunks)
        torch.testing.assert_close(loss, full)
        assert correct == pytest.approx(right / 7 * 4)
    summed, predictions = Loss(None, device=CPU).score(logits, labels[:3])
    assert summed == pytest.approx(float(full) * 7, rel=1e-6)
    assert torch.equal(predictions, logits.argmax(-1)[:3])


def test_shares_of_replicas_average_to_the_mean_of_all() -> None:
    torch.manual_seed(1)
    logits, labels = torch.randn(4, 6, 5), torch.randint(5, (4, 6))
    labels[0] = IGNORED
    losses, correct = [], 0.0
    for part, target in zip(logits.chunk(2), labels.chunk(2), strict=True):
        loss = Loss(None, device=CPU)
        loss.begin(target, 1, labelled=count_labelled(labels), replicas=2)
        losses.append(loss(part, target))
        correct += loss.correct()
    full, complete_correct = loss_in_chunks(logits, labels, 1)
    torch.testing.assert_close(torch.stack(losses).mean(), full)
    assert correct == pytest.approx(complete_correct)


def language_model() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, final_logit_softcapping=5.0))


@pytest.mark.parametrize("piece", [1 << 26, 500, 1])
def test_logits_in_pieces_give_the_loss_and_the_gradients_of_all_at_once(piece: int) -> None:
    """Its head caps logits, which is the model's own code and no part of the last matrix."""
    model = language_model()
    tokens, labels = torch.randint(100, (2, 7)), torch.randint(100, (2, 7))
    labels[1, 4:] = IGNORED
    logits = model(input_ids=tokens).logits
    full = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected = torch.autograd.grad(full, list(model.parameters()))

    units = cut_model(model, (Meta((2, 7), torch.int64),))
    loss = Loss(units.tail, device=CPU, piece=piece)
    loss.begin(labels, 1)
    values: tuple[Tensor, ...] = (tokens,)
    for unit in units.units:
        values = unit(*values)
    found = loss(values, labels)
    torch.testing.assert_close(found, full)
    for gradient, other in zip(torch.autograd.grad(found, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-6, rtol=1e-5)
    assert loss.correct() == pytest.approx(int((logits.argmax(-1) == labels).sum()) / 11 * 2)


def test_logits_in_pieces_are_never_there_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model()
    units = cut_model(model, (Meta((2, 64), torch.int64),))
    assert units.tail is not None
    sizes = []
    of_positions = units.tail.logits
    monkeypatch.setattr(
        units.tail, "logits", lambda *args: (made := of_positions(*args), sizes.append(made.numel()))[0]
    )
    values: tuple[Tensor, ...] = (torch.randint(100, (2, 64)),)
    for unit in units.units:
        values = unit(*values)
    loss, labels = Loss(units.tail, device=CPU, piece=1600), torch.randint(100, (2, 64))
    loss.begin(labels, 1)
    loss(values, labels).backward()
    loss.score(values, labels)
    assert max(sizes) <= 1600
    assert sum(sizes) == 3 * 2 * 64 * 100  # forward, again in the backward pass, evaluation
