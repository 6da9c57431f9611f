"""NumPy's linear algebra on one thread, while somebody asks for that."""

from __future__ import annotations

import numpy as np
import pytest

from thinpipe.links.learned import pca
from thinpipe.links.learned.pca import one_thread


class Library:
    """Notes how many threads it was given."""

    def __init__(self) -> None:
        self.given = [6]

    def get_num_threads(self) -> int:
        return self.given[-1]

    def set_num_threads(self, number: int) -> None:
        self.given.append(number)


def test_one_thread_until_the_last_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(pca, "_numpys", lambda: library)
    with one_thread():
        assert library.given == [6, 1]
        with pytest.raises(np.linalg.LinAlgError), one_thread():
            np.linalg.inv(np.zeros((2, 2)))
        assert library.given == [6, 1]
    assert library.given == [6, 1, 6]


def test_openblas_of_a_wheel_is_found() -> None:
    if "openblas" not in np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]:  # type: ignore[index]
        pytest.skip("NumPy has another library")
    library = pca._numpys()
    before = library.get_num_threads()
    with one_thread():
        assert library.get_num_threads() == 1
    assert library.get_num_threads() == before
