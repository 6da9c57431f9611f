"""Times and peaks of calls whose cost is known."""

import sys
import time

import pytest
import torch

from thinpipe.lab.bench.meter import Times, peak_extra_bytes, time_calls, time_iterations


def test_percentiles_of_known_samples():
    times = Times(tuple(float(i) for i in range(101)))
    assert times.median_ms == 50
    assert times.p95_ms == 95


def test_repeats_after_one_warm_up():
    calls = []
    times = time_calls(lambda: calls.append(1), repeat=7, budget_s=10)
    assert len(times.samples_ms) == 7
    assert len(calls) == 8


def test_stops_at_the_budget():
    calls = []

    def call():
        calls.append(1)
        time.sleep(0.02)

    times = time_calls(call, repeat=1000, budget_s=0.1)
    assert 1 <= len(times.samples_ms) <= 5
    assert times.median_ms >= 20


def test_a_call_longer_than_the_budget_runs_once():
    calls = []

    def call():
        calls.append(1)
        time.sleep(0.05)

    times = time_calls(call, repeat=20, budget_s=0.01)
    assert len(calls) == 1
    assert len(times.samples_ms) == 1


def test_a_call_that_compiles_at_first_is_timed_without_it():
    calls = []

    def call():
        time.sleep(0 if calls else 0.05)
        calls.append(1)

    times = time_calls(call, repeat=3, budget_s=0.01, compiles=True)
    assert len(times.samples_ms) == len(calls) - 1 >= 1
    assert min(times.samples_ms) < 50


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("megabytes", [20, 100])
def test_peak_includes_freed_allocations(megabytes):
    def call():
        torch.ones(megabytes * 1_000_000 // 4).sum()

    call()
    torch.ones(8_000_000).sum()  # freed memory that the allocator may keep must not hide the next allocation
    peak = peak_extra_bytes(call)
    if peak is None:
        pytest.skip("this kernel does not count")
    assert peak == pytest.approx(megabytes * 1e6, abs=2.5e6)  # the kernel counts in batches, per core


def test_an_error_in_the_measured_call_is_not_hidden():
    def call():
        raise OSError("from the call")

    with pytest.raises(OSError, match="from the call"):
        peak_extra_bytes(call)


def test_iterations_are_timed_one_by_one():
    calls = []
    times = time_iterations(lambda: calls.append(None), iterations=5)
    assert len(calls) == len(times.samples_ms) == 5
    assert all(sample > 0 for sample in times.samples_ms)
