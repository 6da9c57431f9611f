"""Keys, which tests of one file share: none of them changes one."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinpipe.comm.secure.identity import Identity, own_identity
from thinpipe.comm.secure.peers import KnownPeers
from thinpipe.comm.secure.ticket import Admission


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    return [own_identity(tmp_path_factory.mktemp("keys") / str(number)) for number in range(4)]


@pytest.fixture
def known(tmp_path: Path) -> KnownPeers:
    return KnownPeers(tmp_path / "known")


@pytest.fixture
def admission(known: KnownPeers) -> Admission:
    return Admission(known)
