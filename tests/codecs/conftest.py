import pytest


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPU kernels, where Triton's interpreter runs them."""
    from tests.codecs.gpu import make_samples_small  # needs Triton, which not all machines have

    make_samples_small(monkeypatch)
