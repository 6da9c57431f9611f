"""The lab's command: many cases and a table, or one case with all that it said."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from tests.faults.cases import KINDS, SERVED_KINDS, run_case, seeds
from tests.faults.expected import Result
from tests.faults.kinds.flaps import Lengths
from tests.faults.summary import failure, line, table
from tests.faults.undisturbed import Undisturbed

RunCase = Callable[..., tuple[Result, Path]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="how many cases (50)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next has the next (0)")
    parser.add_argument(
        "--transport", choices=("gloo", "serve"), default="gloo", help="serve: runs with servers (gloo)"
    )
    parser.add_argument("--only", choices=sorted({*KINDS, *SERVED_KINDS}), help="cases of one kind")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (2)")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="where the table goes, too")
    parser.add_argument("--case", type=int, metavar="SEED", help="this case alone, with all it says; keeps its folder")
    parser.add_argument("--flaps", type=int, default=Lengths.flaps, help="cuts in a case of the kind flap (3)")
    parser.add_argument("--soak", type=float, default=Lengths.soak_s, metavar="SECONDS", help="of a soak (60)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keeps undisturbed runs from one call to the next")
    given = parser.parse_args(arguments)
    # As Ctrl-C: the cases under way clear up after themselves. All three: what a shell ignores for its background jobs
    # would be ignored by the runs, too, and a run that ignores a signal as it was asked to has no fault.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if given.only and given.only not in (SERVED_KINDS if given.transport == "serve" else KINDS):
        parser.error(f"no kind {given.only} of --transport {given.transport}")
    run = partial(run_case, lengths=Lengths(given.flaps, given.soak), transport=given.transport)
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        undisturbed = Undisturbed(given.cache or Path(temporary))
        if given.case is not None:
            return _one(given.case, undisturbed, run)
        wanted = seeds(given.seed, given.count, given.only, given.transport)
        results = _many(wanted, given.jobs, undisturbed, run)
    words = table(results)
    print(f"\n{words}")
    if given.table is not None:
        given.table.write_text(f"{words}\n")
    return int(any(result.problems for result in results))


def _many(wanted: Sequence[int], jobs: int, undisturbed: Undisturbed, run: RunCase) -> list[Result]:
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(run, seed, undisturbed) for seed in wanted]):
                result, folder = done.result()
                results.append(result)
                print(line(result), *([failure(result, folder)] if result.problems else []), sep="\n", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print("the cases under way come to their end, then it is over", file=sys.stderr, flush=True)
    return results


def _one(seed: int, undisturbed: Undisturbed, run: RunCase) -> int:
    result, folder = run(seed, undisturbed, keep=True)
    for path in sorted(folder.glob("*.txt")):
        print(f"--- {path}\n{path.read_text(errors='replace')}")
    print(line(result))
    if result.problems:
        print(failure(result, folder))
    return int(bool(result.problems))


if __name__ == "__main__":
    sys.exit(main())
