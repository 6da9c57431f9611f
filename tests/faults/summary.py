"""A table of the outcomes of many cases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.faults.cases import KINDS, SERVED_KINDS
from tests.faults.expected import Result, Sort, count


def line(result: Result) -> str:
    """One case in a line, and what was measured in lines below."""
    verdict = f"skipped: {result.skipped}" if result.skipped else "passed" if result.passed else "FAILED"
    missed = ", but it was over before" if result.missed else ""
    ended = missed if result.ended_s is None else f", ended after {result.ended_s:.1f} s"
    told = f"{result.seed:>6}  {result.kind:<10} {verdict}  {result.words}{ended}  ({result.seconds:.0f} s)"
    return "\n".join([told, *(f"        {measured}" for measured in result.measured)])


def failure(result: Result, folder: Path) -> str:
    """Why a case failed, and how to repeat it."""
    problems = [f"        {problem.sort}: {problem.text}" for problem in result.problems]
    return "\n".join([*problems, f"        repeat: python -m tests.faults --case {result.seed}    files: {folder}"])


def table(results: Sequence[Result]) -> str:
    """Cases by kind, as Markdown; and the counts that matter most."""
    rows = [
        "| kind | cases | passed | failed | skipped | over before | slowest end, s | mean case, s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    groups = {
        kind: [result for result in results if result.kind == kind]
        for kind in (*KINDS, *(kind for kind in SERVED_KINDS if kind not in KINDS))
    } | {"all": list(results)}
    for kind, group in groups.items():
        if group:
            ends = [result.ended_s for result in group if result.ended_s is not None]
            failed, skipped = sum(bool(each.problems) for each in group), sum(bool(each.skipped) for each in group)
            slowest = f"{max(ends):.1f}" if ends else ""
            mean_s = sum(each.seconds for each in group) / len(group)
            passed = len(group) - failed - skipped
            missed = sum(each.missed for each in group)
            counts = " | ".join(map(str, (len(group), passed, failed, skipped, missed)))
            rows.append(f"| {kind} | {counts} | {slowest} | {mean_s:.0f} |")
    sorts = [f"{count(results, sort)} {name}" for sort, name in _SORTS]
    return "\n".join([*rows, "", ", ".join(sorts), verdict(results)])


_SORTS: tuple[tuple[Sort, str], ...] = (
    ("hang", "hangs"),
    ("silent difference", "silent differences"),
    ("lost steps", "with lost steps"),
)


def verdict(results: Sequence[Result]) -> str:
    failed = sum(bool(result.problems) for result in results)
    skipped = sum(bool(result.skipped) for result in results)
    return f"{len(results) - failed - skipped} passed, {failed} failed" + (f", {skipped} skipped" if skipped else "")
