"""``thinpipe ablate`` with made-up trainings, as a process that tests can interrupt and kill."""

from functools import partial

from tests.lab.ablation.helpers import FAKE_TRAIN
from thinpipe.__main__ import main
from thinpipe.lab.ablation import runner

if __name__ == "__main__":
    runner.carry_out = partial(runner.carry_out, train=FAKE_TRAIN)
    main()
