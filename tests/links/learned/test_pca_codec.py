"""axes:B on links, both ends in this process: sizes known ahead, what travels when, what is remembered and what not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import thinpipe
from tests.links.learned.test_transform import correlated, error
from thinpipe.codecs.kernels import select
from thinpipe.codecs.spec import codec
from thinpipe.links.learned.learner import LEAD, is_due
from thinpipe.links.learned.pca_codec import FIRST, START, PCACodec
from thinpipe.links.learned.row_layout import rows_of
from thinpipe.links.link_codec import RAW_BELOW, LinkCodec
from thinpipe.links.registry import check_directions, link_codec
from thinpipe.links.slot import Route, Slot

CPU = torch.device("cpu")
CHUNKS, SHAPE = 4, (256, 48)
ROWS = rows_of(SHAPE, 2, CHUNKS)
assert ROWS is not None


class Link:
    """A sender, a receiver, and the bytes of each message between them."""

    def __init__(self, spec: str = "axes:2+now", shapes: tuple[tuple[int, ...], ...] = (SHAPE,)) -> None:
        self.sender, self.receiver = (self._end(spec, sends) for sends in (True, False))
        self.configure(shapes)
        self.sizes: list[list[int]] = []  # of the chunks of each step
        self.steps = 0

    def _end(self, spec: str, sends: bool) -> LinkCodec:
        end = link_codec(spec)
        end.attach(Route(0, 1, sends, CPU, None))
        return end

    @property
    def ends(self) -> tuple[LinkCodec, LinkCodec]:
        return self.sender, self.receiver

    def configure(self, shapes: tuple[tuple[int, ...], ...], chunks: int = CHUNKS) -> None:
        for end in self.ends:
            end.configure([Slot(torch.Size(shape), torch.float32) for shape in shapes], chunks)

    def step(self, *tensors: Tensor, training: bool = True) -> list[Tensor]:
        """Tensors of all chunks, one after the other; what arrives of them."""
        self.steps += 1
        for end in self.ends:
            end.begin_step(self.steps, training)
        chunks, received = self.sender.chunks, [torch.full_like(each, 7.0) for each in tensors]
        expected = [
            [self.receiver.wire_format(chunk, index) for index in range(len(tensors))] for chunk in range(chunks)
        ]
        self.sizes.append([])
        for chunk in range(chunks):
            for index, tensor in enumerate(tensors):
                form = self.sender.wire_format(chunk, index)
                assert form == expected[chunk][index]
                assert form.wire_bytes <= self.receiver.max_bytes(index)
                assert not form.raw
                wire = torch.full((form.wire_bytes,), 0xAA, dtype=torch.uint8)
                self.sender.encode(chunk, index, tensor.chunk(chunks)[chunk], wire)
                self.receiver.decode(chunk, index, wire, received[index].chunk(chunks)[chunk])
                self.sizes[-1].append(form.wire_bytes)
        return received

    def state(self) -> dict[str, dict[str, Tensor]]:
        kept = {"forward": self.sender.state_dict(), "sent": self.sender.shared_state_dict()}
        assert all(torch.equal(each, self.receiver.shared_state_dict()[key]) for key, each in kept["sent"].items())
        return {name: {key: each.clone() for key, each in part.items()} for name, part in kept.items()}

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        self.sender.load_state_dict(state["forward"])
        for end in self.ends:
            end.load_shared_state_dict(state["sent"])


def batch(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return correlated((CHUNKS * shape[0], *shape[1:]), seed=seed)


def same(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].keys() == other[name].keys()
        and all(torch.equal(each, other[name][key]) for key, each in part.items() if key != "steps")
        for name, part in one.items()
    )


def test_first_at_eight_bits_then_at_two_and_sizes_are_known_from_shapes_and_steps() -> None:
    link, errors = Link(), []
    for seed in range(30):
        x = batch(seed)
        errors.append(error(link.step(x)[0], x))
    plain, first = ROWS.wire_bytes(2), FIRST.wire_bytes(SHAPE, torch.float32)
    part = -(-ROWS.basis_bytes // CHUNKS)
    due = [step for step in range(30) if is_due(step, ROWS, 2, CHUNKS, 0)]
    assert due == [1, 6, 11, 16, 21, 26]  # then every 5; after 2 and 4 there is no time for it
    expected = [(first if step < 2 + LEAD else plain) + (part if step - LEAD in due else 0) for step in range(30)]
    assert link.sizes == [[size] * CHUNKS for size in expected]
    assert sum(map(sum, link.sizes[8:28])) < 1.05 * 20 * CHUNKS * plain
    assert max(errors[: 2 + LEAD]) < 0.005
    tile = codec("tile:2")
    assert max(errors[2 + LEAD :]) < 0.3 * error(tile.decode(tile.encode(x), torch.empty_like(x)), x)
    slot = Slot(torch.Size(SHAPE), torch.float32)
    assert [form.wire_bytes for form in link_codec("axes:2").wire_formats(slot, CHUNKS)] == [first, plain]
    assert link_codec("axes:2+now").basis_schedule(slot, CHUNKS) == (CHUNKS * part, 5, 2 + LEAD, 8)
    assert link_codec("axes:2").basis_schedule(slot, CHUNKS) == (CHUNKS * part, 5, START + 1 + LEAD, 8)


def test_without_now_the_first_steps_use_the_warmup_codec() -> None:
    link = Link("axes:2")
    for seed in range(START + LEAD + 3):
        link.step(batch(seed))
    part = -(-ROWS.basis_bytes // CHUNKS)
    plain, first = ROWS.wire_bytes(2), FIRST.wire_bytes(SHAPE, torch.float32)
    assert [sizes[0] for sizes in link.sizes] == [first] * (START + LEAD) + [first + part, plain, plain]


def test_the_basis_follows_changing_activations() -> None:
    """Another mean and other axes than in the beginning."""
    link = Link()
    other = torch.linalg.qr(torch.randn(48, 48, generator=torch.Generator().manual_seed(0))).Q
    for seed in range(8):
        link.step(batch(seed))
    errors = []
    for seed in range(8, 70):
        x = batch(seed) @ other + 5
        errors.append(error(link.step(x)[0], x))
    assert errors[0] > 3 * errors[-1]
    assert errors[-1] < 0.1


def test_evaluations_use_the_axes_and_leave_no_trace() -> None:
    """Between any two steps, also where a message carries something or an axis is being learned."""
    one, other = Link(), Link()
    for seed in range(9):
        assert torch.equal(*(link.step(batch(seed))[0] for link in (one, other)))
        before = other.state()
        x = batch(100 + seed)
        received = other.step(x, training=False)[0]
        assert other.sizes.pop() == [(FIRST.wire_bytes(SHAPE, torch.float32), ROWS.wire_bytes(2))[seed > LEAD]] * CHUNKS
        assert error(received, x) < 0.06
        assert same(before, other.state())
    assert one.sizes == other.sizes
    assert same(one.state(), other.state())


@pytest.mark.parametrize("stopped", range(1, 8))
def test_a_saved_state_continues_bit_identically(stopped: int) -> None:
    reference, rest = Link(), Link()
    for seed in range(stopped):
        reference.step(batch(seed))
    rest.load(reference.state())
    for seed in range(stopped, stopped + 4):
        assert torch.equal(*(link.step(batch(seed))[0] for link in (reference, rest)))
    assert rest.sizes == reference.sizes[stopped:]
    assert same(reference.state(), rest.state())


def test_a_state_with_separate_moments_is_read_and_its_basis_is_sent_immediately() -> None:
    """As states were when learning had one step for it."""
    reference, rest = Link(), Link()
    for seed in range(2):
        reference.step(batch(seed))
    state = reference.state()
    assert state["sent"]["0.steps"].tolist() == [2, LEAD]
    state["sent"]["0.steps"][1] = 1
    sizes = ROWS.groups, ROWS.size
    products, mean = state["forward"].pop("0.moments").split([sizes[0] * sizes[1] ** 2, sizes[0] * sizes[1]])
    state["forward"] |= {"0.products": products.view(*sizes, -1), "0.mean": mean.view(*sizes, 1)}
    rest.load(state)
    for link in (reference, rest):
        link.step(batch(2))
    assert torch.equal(rest.state()["forward"]["0.moments"], reference.state()["forward"]["0.moments"])
    for seed in range(3, 2 + LEAD):
        reference.step(batch(seed))
    assert rest.sizes == reference.sizes[1 + LEAD :]
    assert torch.equal(rest.state()["sent"]["0.known"], reference.state()["sent"]["0.known"])


@pytest.mark.parametrize("start", [0, START])
@pytest.mark.parametrize("shape", [(8, 48), (64, 48), (256, 48), (16, 128, 768), (4, 64, 56, 56)], ids=str)
def test_a_basis_update_is_sent_completely_before_the_next(shape: tuple[int, ...], start: int) -> None:
    for chunks, bits in itertools.product((1, 3, 8), (0.5, 2, 8)):
        rows = rows_of(shape, bits, chunks)
        assert rows is not None
        due = [step for step in range(start + 400) if is_due(step, rows, bits, chunks, start)]
        every = rows.every(bits, chunks)
        assert due[0] >= start
        assert min(after - before for before, after in itertools.pairwise(due)) >= LEAD
        assert max(after - before for before, after in itertools.pairwise(due)) <= every
        assert set(range(due[0], start + 400, every)) <= set(due)


def test_without_saved_state_learning_starts_again() -> None:
    link = Link()
    for seed in range(5):
        link.step(batch(seed))
    link.load({"forward": {}, "sent": {}})
    link.step(batch(5))
    assert link.sizes[-1] == link.sizes[0]


def test_other_chunks_keep_the_axes_and_other_shapes_begin_anew() -> None:
    link = Link()
    for seed in range(8):
        link.step(batch(seed))
    link.configure(((192, 48),))
    x = batch(8, (192, 48))
    assert error(link.step(x)[0], x) < 0.06
    assert max(link.sizes[-1]) < codec("tile:4").wire_bytes((192, 48), torch.float32)
    link.configure(((192, 64),))
    link.step(batch(9, (192, 64)), training=False)  # of which nothing is known, and nothing learned
    link.configure((SHAPE,))
    link.step(batch(10), training=False)
    assert link.sizes[-2:] == [[FIRST.wire_bytes((192, 64), torch.float32)] * CHUNKS, [ROWS.wire_bytes(2)] * CHUNKS]
    link.configure(((192, 64),))
    link.step(batch(11, (192, 64)))
    assert link.sizes[-1] == [FIRST.wire_bytes((192, 64), torch.float32)] * CHUNKS


def test_every_tensor_of_a_message_has_axes_of_its_own() -> None:
    link = Link(shapes=(SHAPE, (8, 16, 16, 16)))
    for seed in range(6):
        x, image = batch(seed), torch.nn.functional.avg_pool2d(torch.randn(32, 16, 48, 48), 3)
        received = link.step(x, image)
    assert error(received[0], x) < 0.06
    assert float((received[1] - image).square().sum() / image.square().sum()) < 0.12
    assert {key.partition(".")[0] for key in link.sender.shared_state_dict()} == {"0", "1"}


def test_non_finite_values_pass_and_learning_continues() -> None:
    link = Link()
    for seed in range(14):
        x = batch(seed)
        if seed in (1, 5, 10):
            x[3, 5] = torch.inf
        received = link.step(x)[0]
        assert bool(received.isfinite().all()) == (seed not in (1, 5, 10))
    assert error(received, x) < 0.06


def test_small_tensors_and_integers_travel_as_they_are() -> None:
    end = link_codec("axes:1")
    for shape, dtype in [
        ((RAW_BELOW // 64 - 1, 16), torch.float32),
        ((64, 64), torch.int64),
        ((1 << 14,), torch.float32),
    ]:
        forms = end.wire_formats(Slot(torch.Size(shape), dtype), CHUNKS)
        assert len(forms) == 1
        assert forms[0].raw == (len(shape) > 1)


def test_a_step_calls_no_kernel_that_a_warm_up_has_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    kernels = select("auto", CPU)

    def noting(name: str) -> Callable[..., None]:
        kernel = getattr(kernels, name)

        def noted(*given: object) -> None:
            called.add(name)
            kernel(*given)

        return noted

    for name in ("find_gains", "encode_axes", "decode_axes", "fold_moments", "encode_tile", "decode_tile"):
        monkeypatch.setattr(kernels, name, noting(name))
    link_codec("axes:2").warm_up(Slot(torch.Size(SHAPE), torch.float32), CHUNKS, CPU)
    warm = set(called)
    called.clear()
    link = Link()
    for _ in range(3 + LEAD):
        link.step(correlated((CHUNKS * SHAPE[0], SHAPE[1])))
    assert called <= warm
    assert {"encode_axes", "fold_moments"} <= called


def test_warm_up_touches_nothing() -> None:
    end = link_codec("axes:2")
    end.warm_up(Slot(torch.Size(SHAPE), torch.float32), CHUNKS, CPU)
    assert end.state_dict() == {} == end.shared_state_dict()


@pytest.mark.parametrize(
    ("written", "canonical"), [("axes:2", "axes:2"), (" axes:1.50", "axes:1.5"), ("axes:.5 + now", "axes:0.5+now")]
)
def test_specs(written: str, canonical: str) -> None:
    found = link_codec(written)
    assert isinstance(found, PCACodec)
    assert found.spec == canonical


@pytest.mark.parametrize("spec", ["axes:0.4", "axes:9", "axes:", "axes:two", "axes:nan", "axes:2+", "axes:2+soon"])
def test_errors_of_invalid_specs_name_the_rule(spec: str) -> None:
    with pytest.raises(ValueError, match=r"makes no sense: .*from 0.5 to 8, as in axes:2 or axes:1.5"):
        link_codec(spec)


def test_gradients_are_refused() -> None:
    check_directions("axes:2", "tile:4+zero")
    with pytest.raises(ValueError, match=r"axes:2 is for activations, .* Give gradients another codec"):
        check_directions("axes:2", "axes:2")


@pytest.mark.parametrize("use", [thinpipe.codec, thinpipe.ddp_state], ids=["codec", "ddp"])
def test_without_a_link_the_error_names_the_link(use: object) -> None:
    assert callable(use)
    with pytest.raises(ValueError, match=r"axes:2 learns from what a link carries\b.* here take gauss:2"):
        use("axes:2")
