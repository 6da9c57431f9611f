"""Every test starts from the same random state."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _reseed() -> None:
    torch.manual_seed(0)
