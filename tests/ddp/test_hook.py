"""The hook on two replicas: one result for all, what is lost comes later, bytes are counted, memory is kept."""

import pytest
import torch

from tests.ddp.replica import (
    SIZES,
    count,
    decodes,
    feed_back,
    overflow,
    refuse,
    resume,
    rounding_keys,
    run,
    threads_at_the_end,
    without_a_peer,
)

SPECS = ["fp16", "uniform:8", "uniform:2", "sort:8", "kmeans:4", "tile:4+sr", "power:4", "topk:0.1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_uncompressed_equals_plain_ddp(pool, dtype):
    ours, _ = pool.run(run, 2, "none", 3, {"dtype": dtype})
    plain, _ = pool.run(run, 2, None, 3, {"dtype": dtype})
    for step, right in zip(ours, plain, strict=True):
        for name, gradient in step.items():
            torch.testing.assert_close(gradient, right[name], rtol=0, atol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_replicas_agree_to_the_last_bit(pool, spec):
    first, second = pool.run(run, 2, spec, 3, {})
    plain, _ = pool.run(run, 2, None, 3, {})
    for ours, others, right in zip(first, second, plain, strict=True):
        assert all(torch.equal(ours[name], others[name]) for name in ours)
        assert not torch.equal(ours["2.weight"], right["2.weight"]), "nothing was lost: was it compressed?"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_gradients_stay_close(pool, dtype):
    (ours,), (others,) = pool.run(run, 2, "uniform:8", 1, {"dtype": dtype})
    (right,), _ = pool.run(run, 2, None, 1, {})
    for name, gradient in ours.items():
        assert gradient.dtype == dtype
        assert torch.equal(gradient, others[name])
        assert (gradient.float() - right[name]).norm() < 0.05 * right[name].norm()


@pytest.mark.parametrize("spec", SPECS)
def test_error_feedback_is_exactly_the_compression_error(pool, spec):
    for results in pool.run(feed_back, 2, spec, 5):
        for name, (out, right, owed) in results.items():
            torch.testing.assert_close(out + owed, right, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert results["2.weight"][2].abs().max() > 0


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_every_message_is_decoded_once(pool, replicas, error_feedback):
    assert pool.run(decodes, replicas, error_feedback) == [replicas] * replicas


@pytest.mark.parametrize("replicas", [3, 4])
def test_more_replicas_agree_to_the_last_bit(pool, replicas):
    first, *others = pool.run(run, replicas, "tile:4", 3, {})
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_feedback_the_loss_is_for_good(pool):
    plain, _ = pool.run(run, 2, None, 20, {})
    right = sum(step["2.weight"] for step in plain)

    def off(options):
        ours, _ = pool.run(run, 2, "topk:0.1", 20, options)
        return ((sum(step["2.weight"] for step in ours) - right).norm() / right.norm()).item()

    assert off({"error_feedback": True}) < 0.7 * off({"error_feedback": False})


def test_bytes_are_counted(pool):
    for steps, gradient_bytes, wire_bytes in pool.run(count, 2, "uniform:8", 3):
        assert steps == 3
        assert gradient_bytes == 3 * 4 * sum(SIZES.values())
        # Weights at a byte a value with a header and padding; biases, too small to compress, as they are.
        least = 3 * (SIZES["0.weight"] + SIZES["2.weight"] + 4 * (SIZES["0.bias"] + SIZES["2.bias"]))
        assert least < wire_bytes <= least + 3 * 4 * 32
    (_, gradient_bytes, wire_bytes), _ = pool.run(count, 2, "none", 1)
    assert gradient_bytes == wire_bytes


@pytest.mark.parametrize("spec", ["uniform:2", "power:4", "tile:4+sr"])
def test_memory_is_saved_and_restored(pool, spec):
    for unbroken, restored, forgot in pool.run(resume, 2, spec):
        assert all(torch.equal(unbroken[name], restored[name]) for name in unbroken)
        assert not torch.equal(unbroken["2.weight"], forgot["2.weight"])


def test_every_replica_gradient_and_step_is_rounded_by_itself(pool):
    first, again, other = ([k for keys in pool.run(rounding_keys, 2, seed) for k in keys] for seed in (1, 1, 2))
    assert len(first) == 2 * 2 * 3  # replicas, weights, steps; biases are too small to be compressed
    assert len({*first, *other}) == 2 * len(first)
    assert first == again


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": "sort:6+2"}, "spec was 'sort:6+2' and is 'uniform:8'"),
        ({"rank": 7}, "rank was 7"),
        ({"replicas": 4}, "replicas was 4 and is 2"),
        ({"parameters": {"9.weight": {}}}, "no '9.weight'"),
        ({"parameters": {"0.weight": {"error": torch.zeros(3), "codec": {}}}}, "'0.weight' had 3 values and has 1152"),
    ],
    ids=["spec", "rank", "replicas", "name", "size"],
)
def test_memory_of_another_run_is_refused(pool, change, message):
    assert all(message in said for said in pool.run(refuse, 2, change))


def test_an_overflow_is_seen_by_all_and_forgotten_by_the_next_step(pool):
    assert pool.run(overflow, 2) == [(True, True)] * 2


def test_a_program_ends_when_threads_of_gloo_have_let_go(pool):
    for states in pool.run(threads_at_the_end, 2):
        assert states, "torch has another name for them"
        assert set(states) == {"S"}


def test_an_exchange_that_failed_is_an_error(pool):
    assert all("Connection closed by peer" in said for said in pool.run(without_a_peer, 2))
