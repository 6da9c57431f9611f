"""delta(...) on links: what travels in which pass, the same copies at both ends, where they lie, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining

import thinpipe
from tests.pipeline.models import batch, cut, seeded
from tests.pipeline.pipelines import make, run_step
from tests.pool import Pool
from thinpipe.links.message import CHECKSUM_BYTES
from thinpipe.links.sample_cache import COPY_DTYPE, SampleCopies, check_samples, copies_bytes
from thinpipe.pipeline import PipelineStage
from thinpipe.pipeline.report import report, reset_counters

SAMPLES, ROWS, WIDTH, CHUNKS = 64, 32, 256, 4
SHAPE = (ROWS // CHUNKS, WIDTH)  # of a chunk: 8 kB, too large to travel raw
OPTIONS: dict[str, Any] = {"forward": "delta(uniform:2)", "backward": "uniform:8", "samples": SAMPLES}
KEPT, KEPT_SHAPE = 10, (3, 4)


def step_bytes(spec: str) -> int:
    return CHUNKS * (thinpipe.codec(spec).wire_bytes(SHAPE, torch.float32) + CHECKSUM_BYTES)


FIRST, CHANGE = step_bytes("uniform:8"), step_bytes("uniform:2")


class Run:
    """A pipeline whose samples are 64 points, trained a little by every step."""

    def __init__(self, stages: list[PipelineStage], schedule: Any) -> None:
        self.stages, self.schedule = stages, schedule
        self.x, self.y = batch(SAMPLES, WIDTH)
        self.optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.05)

    def step(self, samples: Tensor) -> int:
        """One step on these; the bytes that each forward link carried, as all of them report."""
        for stage in self.stages:
            stage.set_samples(samples)
        run_step(self.stages, self.schedule, self.x[samples], self.y[samples])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.carried()

    def carried(self) -> int:
        links = [link for link in report(self.stages) if link.direction == "forward"]
        reset_counters(self.stages)
        assert all(link.wire_bytes == links[0].wire_bytes for link in links)
        return links[0].wire_bytes

    def copies(self) -> dict[str, dict[str, Tensor]]:
        """By what was sent over which link, at the ends that are here."""
        kept: dict[str, dict[str, Tensor]] = {}
        for stage in self.stages:
            state = stage.link_state_dict()
            for name, source in (("sent", stage.stage_index), ("received", stage.stage_index - 1)):
                if name in state:
                    kept[f"{name} from {source}"] = {key: each.clone() for key, each in state[name].items()}
        return kept


def passes(group: Any, layout: str, order: str, options: dict[str, Any]) -> tuple[list[int], Any]:
    run = Run(*make(group, layout, order, CHUNKS, seeded(4, WIDTH), **OPTIONS | options))
    return two_passes(run)


def two_passes(run: Run) -> tuple[list[int], Any]:
    """Every sample twice, in another order the second time; between them an evaluation."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3))
    carried = [run.step(order[:ROWS]), run.step(order[ROWS:])]
    before = run.copies()
    carried.append(evaluate(run))
    for end, state in run.copies().items():
        assert all(torch.equal(each, before[end][key]) for key, each in state.items())
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(4))
    carried += [run.step(order[:ROWS]), run.step(order[ROWS:])]
    for end, state in run.copies().items():
        assert not torch.equal(state["0"], before[end]["0"])
    return carried, run.copies()


def evaluate(run: Run) -> int:
    first, last = any(s.is_first for s in run.stages), any(s.is_last for s in run.stages)
    with torch.no_grad():
        run.schedule.eval(*([run.x[:ROWS]] if first else []), target=run.y[:ROWS] if last else None)
    return run.carried()


def check(results: list[tuple[list[int], Any]], links: int, first: int = FIRST) -> None:
    ends = {end: copies for _, kept in results for end, copies in kept.items()}
    assert len(ends) == 2 * links
    for source in range(links):
        sent, received = ends[f"sent from {source}"], ends[f"received from {source}"]
        assert sent.keys() == received.keys() == {"known", "0"}
        assert sent["known"].all()
        assert sent["0"].shape == (SAMPLES, WIDTH)
        assert sent["0"].std() > 0.1
        assert all(torch.equal(sent[key], received[key]) for key in sent)
    for carried, _ in results:
        assert carried == [first, first, first, CHANGE, CHANGE]


@pytest.mark.parametrize("layout", ["linear", "client-server"])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_first_values_then_changes_and_both_ends_keep_the_same(pool: Pool, layout: str, order: str) -> None:
    check(pool.run(passes, 3, layout, order, {}), links=3 if layout == "client-server" else 2)


@pytest.mark.parametrize("first", ["none", "fp16"])
def test_the_first_pass_has_a_codec_of_its_own(pool: Pool, first: str) -> None:
    options = {"forward": f"delta(uniform:2,first={first})"}
    check(pool.run(passes, 2, "client-server", "gpipe", options), links=2, first=step_bytes(first))


def test_on_disk_and_in_the_order_of_the_schedule(pool: Pool, tmp_path: Any) -> None:
    options = {"copies_in": tmp_path / "copies", "post_ahead": False}
    check(pool.run(passes, 2, "linear", "1f1b", options), links=1)


def interleaved(group: Any) -> tuple[list[int], Any]:
    worker, workers = group.rank(), group.size()
    modules = cut(seeded(4, WIDTH), 4)
    stages = [
        PipelineStage(modules[index], index, 4, "cpu", group=group, **OPTIONS) for index in range(worker, 4, workers)
    ]
    return two_passes(Run(stages, pipelining.ScheduleInterleaved1F1B(stages, CHUNKS, nn.functional.mse_loss)))


def test_under_a_schedule_of_torch_with_two_stages_on_a_worker(pool: Pool) -> None:
    check(pool.run(interleaved, 2), links=3)


def partly_known(group: Any) -> list[int]:
    run = Run(*make(group, "linear", "gpipe", CHUNKS, seeded(2, WIDTH), **OPTIONS))
    run.step(torch.arange(ROWS))
    mixed = torch.cat([torch.arange(ROWS - 1), torch.tensor([ROWS])])  # one new sample, in the last chunk
    return [run.step(mixed), run.step(mixed)]


def test_a_chunk_with_a_new_sample_is_sent_in_full(pool: Pool) -> None:
    once = (3 * CHANGE + FIRST) // CHUNKS
    assert pool.run(partly_known, 2) == [[once, CHANGE]] * 2


def received_errors(group: Any, spec: str) -> list[float]:
    """Relative error of what arrives, in each of three passes over the same samples, with the same weights."""
    options = OPTIONS | {"forward": spec}
    run = Run(*make(group, "linear", "gpipe", CHUNKS, seeded(2, WIDTH), **options))
    errors = []
    for _ in range(3):
        inputs: list[Tensor] = []
        stage = run.stages[0]
        hook = stage.submod.register_forward_pre_hook(
            lambda module, args, kept=inputs: kept.append(args[0].detach().clone())
        )
        with torch.no_grad():
            truth = cut(seeded(2, WIDTH), 2)[0](run.x[:ROWS])
        if "delta" in spec:
            stage.set_samples(torch.arange(ROWS))
        run_step(run.stages, run.schedule, run.x[:ROWS], run.y[:ROWS])
        hook.remove()
        received = torch.cat(inputs[-CHUNKS:])  # before the first step torch runs the module once more
        errors.append(float((received - truth).norm() / truth.norm()))
    return errors


def test_repeated_activations_are_decoded_with_decreasing_error(pool: Pool) -> None:
    """The error of one pass is what the next one has to send."""
    plain = pool.run(received_errors, 2, "uniform:2")[1]
    first, second, third = pool.run(received_errors, 2, "delta(uniform:2)")[1]
    assert plain[0] == plain[2] > 0.1
    assert 0.05 * plain[0] > first > 2 * second > 4 * third > 0


class Masked(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x) * mask, mask


class Unmasked(Masked):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, mask)[0]


def with_mask(group: Any) -> tuple[list[int], list[str]]:
    worker = group.rank()
    units = seeded(2, WIDTH)
    module = (Masked, Unmasked)[worker](units[worker])
    stage = PipelineStage(module, worker, 2, "cpu", group=group, **OPTIONS)
    schedule = pipelining.ScheduleGPipe(stage, CHUNKS, nn.functional.mse_loss)
    x, y = batch(ROWS, WIDTH)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.int64)
    sizes = []
    for _ in range(2):
        stage.set_samples(range(ROWS))
        schedule.step(*([x, mask] if stage.is_first else []), target=y if stage.is_last else None)
        sizes.append(report([stage])[0].wire_bytes)
        reset_counters([stage])
    return sizes, sorted(next(iter(stage.link_state_dict()[name] for name in ("sent", "received")[worker:])))


def test_masks_have_no_copies_and_cost_nothing_if_they_are_all_ones(pool: Pool) -> None:
    mask = CHUNKS * (9 + CHECKSUM_BYTES)
    for sizes, kept in pool.run(with_mask, 2):
        assert sizes == [FIRST + mask, CHANGE + mask]
        assert kept == ["0", "known"]


def saved_and_loaded(group: Any) -> None:
    """A new pipeline goes on where another was, to the bit."""
    first = Run(*make(group, "linear", "gpipe", CHUNKS, seeded(2, WIDTH), **OPTIONS))
    first.step(torch.arange(ROWS))
    weights = {key: value.clone() for key, value in first.stages[0].submod.state_dict().items()}
    state = {
        name: {key: each.clone() for key, each in kept.items()}
        for name, kept in first.stages[0].link_state_dict().items()
    }
    second = Run(*make(group, "linear", "gpipe", CHUNKS, seeded(2, WIDTH, seed=9), **OPTIONS))
    second.stages[0].submod.load_state_dict(weights)
    second.stages[0].load_link_state_dict(state)
    assert [run.step(torch.arange(ROWS)) for run in (first, second)] == [CHANGE, CHANGE]
    for end, kept in first.copies().items():
        assert all(torch.equal(each, second.copies()[end][key]) for key, each in kept.items())
    for p, q in zip(first.stages[0].submod.parameters(), second.stages[0].submod.parameters(), strict=True):
        assert torch.equal(p, q)


def test_links_save_and_load_their_copies(pool: Pool) -> None:
    pool.run(saved_and_loaded, 2)


def refusals(group: Any) -> dict[str, str]:
    """Each of these is refused before anything travels, on every worker."""
    errors = {}

    def refused(name: str, call: Any) -> None:
        with pytest.raises(ValueError) as caught:  # noqa: PT011, the test reads the message
            call()
        errors[name] = str(caught.value)

    def stage(**options: Any) -> PipelineStage:
        return PipelineStage(nn.Identity(), group.rank(), 2, "cpu", group=group, **OPTIONS | options)

    refused("gradients", lambda: stage(backward="delta(uniform:2)"))
    refused("count", lambda: stage(samples=None))
    refused("other codec", lambda: stage(forward="uniform:2").set_samples([0]))
    refused("range", lambda: stage().set_samples([SAMPLES]))
    for name, samples in (("no samples", None), ("too few", range(ROWS - CHUNKS))):
        stages, schedule = make(group, "linear", "gpipe", CHUNKS, seeded(2, WIDTH), **OPTIONS)
        if samples is not None:
            stages[0].set_samples(samples)
        refused(name, lambda stages=stages, schedule=schedule: run_step(stages, schedule, *batch(ROWS, WIDTH)))
    return errors


def test_invalid_specs_are_rejected_with_the_reason(pool: Pool) -> None:
    for errors in pool.run(refusals, 2):
        assert "The gradient of a sample is no prediction of its next one" in errors["gradients"]
        assert "as in uniform:2" in errors["gradients"]
        assert "give their number, samples=N" in errors["count"]
        assert "only delta(...) needs the samples of a step" in errors["other codec"]
        assert "there are 64, got 64" in errors["range"]
        assert "stage.set_samples(indices)" in errors["no samples"]
        assert "has none" in errors["no samples"]
        assert "4 chunks of float32[8, 256]" in errors["too few"]
        assert "the step has 28" in errors["too few"]


def filled(directory: Path | None = None) -> tuple[SampleCopies, torch.Tensor]:
    copies, value = SampleCopies(KEPT, directory), torch.randn(4, *KEPT_SHAPE)
    copies.reserve(0, KEPT_SHAPE)
    copies.begin(torch.tensor([7, 2, 5, 0]), 2)
    for chunk in range(2):
        copies.store(chunk, 0, value[2 * chunk : 2 * chunk + 2])
    return copies, value


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_chunk_is_known_when_all_its_samples_are(tmp_path: Path, on_disk: bool) -> None:
    copies, value = filled(tmp_path / "deep" / "cache" if on_disk else None)
    assert not copies.knows(0)  # the current step had been set before
    copies.begin(torch.tensor([0, 7, 2, 1]), 2)
    assert [copies.knows(0), copies.knows(1)] == [True, False]
    x = torch.randn(2, *KEPT_SHAPE)
    assert torch.equal(copies.change(0, 0, x), x - value[[3, 0]].to(COPY_DTYPE).float())
    change = torch.randn(2, *KEPT_SHAPE)
    applied = copies.apply(0, 0, change)
    assert torch.equal(applied, value[[3, 0]].to(COPY_DTYPE).float() + change)
    assert torch.equal(copies.state_dict()["0"][[0, 7]], applied.to(COPY_DTYPE))
    assert not list(tmp_path.rglob("*.*")), "a file is gone with its process, however that ends"


def test_an_evaluation_changes_nothing() -> None:
    copies, _ = filled()
    before = {name: tensor.clone() for name, tensor in copies.state_dict().items()}
    copies.begin(None, 2)
    assert not copies.are_kept
    assert not copies.knows(0)
    copies.store(0, 0, torch.ones(2, *KEPT_SHAPE))
    assert all(torch.equal(tensor, before[name]) for name, tensor in copies.state_dict().items())


def test_half_precision_errors_are_corrected_by_the_next_change() -> None:
    copies, _ = filled()
    hard = torch.tensor([1e30, -1e30, float("nan"), float("inf"), 65519.0, 1e-12, 3.0, -0.0, 1.0, 2.0, 3.0, 4.0])
    value = torch.stack([hard.view(KEPT_SHAPE), hard.view(KEPT_SHAPE)])
    copies.begin(torch.tensor([1, 3]), 1)
    copies.store(0, 0, value)
    assert copies.state_dict()["0"].isfinite().all()
    copies.begin(torch.tensor([1, 3]), 1)
    finite = value.isfinite()
    change = copies.change(0, 0, value)
    torch.testing.assert_close(copies.apply(0, 0, change)[finite], value[finite])
    assert not change[~finite].isfinite().any()  # not hidden


def test_saved_and_loaded(tmp_path: Path) -> None:
    copies, _ = filled()
    other = SampleCopies(KEPT, tmp_path)
    other.load_state_dict(copies.state_dict())
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in copies.state_dict().items())
    other.load_state_dict({})
    assert not other.known.any()
    with pytest.raises(ValueError, match="copies of 11 samples are kept here, these are of 10"):
        SampleCopies(11).load_state_dict(copies.state_dict())
    with pytest.raises(ValueError, match=r"tensor 0 has \[5\] each, its copies have \[3, 4\]"):
        copies.reserve(0, (5,))


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"copies of samples need 0\.0 MB in .*file.*name another place"):
        SampleCopies(KEPT, tmp_path / "file").reserve(0, KEPT_SHAPE)
    with pytest.raises(ValueError, match="Free some space"):
        SampleCopies(1 << 20, tmp_path).reserve(0, (1 << 30,))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_bytes_are_those_of_all_samples() -> None:
    copies, _ = filled()
    stored = copies.state_dict()["0"]
    assert copies_bytes(KEPT, (2, *KEPT_SHAPE)) == stored.numel() * stored.element_size()


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([0, 10], "counted from 0 and there are 10, got 10"),
        ([-1, 3], "got -1"),
        ([4, 2, 4], "all different, got 4 twice"),
        ([0.5, 1.5], "whole numbers in one dimension"),
        ([[0, 1]], "whole numbers in one dimension, got 2-D"),
    ],
)
def test_invalid_sample_lists(samples: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_samples(samples, KEPT)
