"""The results of a benchmark, in the one form in which the command line shows and writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinpipe.lab.records.plot import Plot
from thinpipe.lab.records.record import Record
from thinpipe.lab.records.report import Table

Print = Callable[[str], None]  # receives a line of text


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The record of a benchmark, and the tables and the plot that show it."""

    title: str  # of the page and the plot
    record: Record
    tables: Sequence[Table]
    plot: Plot
    note: str = ""  # below the table of checks
