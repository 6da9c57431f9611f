"""A few faults, each on a real run; `make faults` has the rest."""

from __future__ import annotations

import pytest

from tests.faults.cases import Transport, kind_of, run_case
from tests.faults.runs import Setting
from tests.faults.undisturbed import Undisturbed

SETTING = Setting(workers=2, codec="8bit")  # one for all, so that one undisturbed run speaks for all

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("transport", "seed", "kind"),
    [
        ("gloo", 55, "signal"),  # SIGKILL to the server while it saves
        ("gloo", 0, "options"),  # of one of two machines
        ("gloo", 277, "stranger"),  # who sends half a message before the server comes
        ("serve", 36, "corrupt"),  # junk inserted into encrypted bytes
    ],
)
def test_a_fault_ends_or_is_survived_as_promised(
    undisturbed: Undisturbed, transport: Transport, seed: int, kind: str
) -> None:
    assert kind_of(seed, transport) == kind
    result, folder = run_case(seed, undisturbed, transport=transport, setting=SETTING, forked=True)
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.missed, result.words
    words = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("err-*.txt")))
    assert not result.problems, f"{result.words}\n{result.problems}\n{words}"
