import pytest


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare tests of GPU kernels for Triton's interpreter."""
    from tests.codecs.gpu import make_samples_small  # needs Triton, which not all machines have

    make_samples_small(monkeypatch)
