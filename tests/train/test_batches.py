"""Data order is a function of seed and epoch; replicas share a batch without overlap."""

from __future__ import annotations

import torch

from tests.train.toy import AugmentedSplit, ToySplit
from thinpipe.train.batches import TrainingBatches, epoch_order, evaluation_samples, mixed_seed


def test_an_epoch_sees_every_sample_once_in_an_order_of_its_own() -> None:
    orders = [epoch_order(101, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert order.sort().values.tolist() == list(range(101))
    assert len({tuple(order.tolist()) for order in orders}) == 3


def test_order_is_alike_every_time_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    assert torch.equal(epoch_order(50, seed=3, epoch=7), epoch_order(50, seed=3, epoch=7))
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_of_neighbours_differ() -> None:
    seeds = {mixed_seed(seed, epoch, position) for seed in range(8) for epoch in range(8) for position in range(8)}
    assert len(seeds) == 8**3


def test_a_batch_is_always_augmented_alike() -> None:
    batches = [TrainingBatches(ToySplit(70, 0), batch_size=16, seed=5) for _ in range(2)]
    batches[0].step(0, 0)
    for a, b in zip(batches[0].step(1, 3)[0].inputs, batches[1].step(1, 3)[0].inputs, strict=True):
        assert torch.equal(a, b)


def test_replicas_share_the_batch_that_one_process_sees() -> None:
    split = ToySplit(70, 0)
    (whole,) = TrainingBatches(split, batch_size=16, seed=5).step(0, 2)
    shares = [TrainingBatches(split, batch_size=16, seed=5, share=(replica, 2)).step(0, 2)[0] for replica in range(2)]
    assert torch.equal(torch.cat([share.labels for share in shares]), whole.labels)


def test_a_step_has_the_batches_that_as_many_steps_of_one_have() -> None:
    split = AugmentedSplit(70, 0)
    steps = TrainingBatches(split, batch_size=8, seed=5)
    together = TrainingBatches(split, batch_size=8, seed=5, accumulate=3).step(1, 1)
    for batch, number in zip(together, (3, 4, 5), strict=True):
        (alone,) = steps.step(1, number)
        assert torch.equal(batch.inputs[0], alone.inputs[0])


def test_the_last_evaluation_batch_is_full() -> None:
    split = ToySplit(10, 0)
    batch = split.batch(evaluation_samples(len(split), 8, 4))
    assert torch.equal(batch.labels, split.labels[[8, 9, 0, 0]])
