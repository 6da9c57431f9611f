"""The workers that the pipeline tests share."""

from collections.abc import Iterator

import pytest

from tests.pipeline.pool import Pool


@pytest.fixture(scope="session")
def _pools() -> Iterator[list[Pool]]:
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(_pools: list[Pool]) -> Pool:
    """Four workers, started for the first test that needs them and again after one that ended them."""
    if not _pools or not _pools[-1].alive:
        _pools.append(Pool(4))
    return _pools[-1]
