"""The roster of a run: its workers with their keys, the routes of their connections, and who dials whom."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from thinpipe.comm.secure.gate import ROUTE_BYTES
from thinpipe.options import from_facts
from thinpipe.system.sanitize import one_line

Dialers = Mapping[tuple[int, int], int | None]  # of each pair of servers; None: the client relays it


@dataclass(frozen=True, kw_only=True)
class RosterEntry:
    """One worker: its machine's name and key, and where the others can try to reach it, if anywhere."""

    name: str
    fingerprint: str  # in hexadecimal
    host: str | None = None
    port: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Roster:
    """The workers of a run by number; worker 0 is the client."""

    run: str  # id, in hexadecimal
    entries: tuple[RosterEntry, ...]

    def fingerprint(self, worker: int) -> bytes:
        return bytes.fromhex(self.entries[worker].fingerprint)

    def route(self, one: int, other: int) -> bytes:
        """Return the route of the connection of two workers. It is no secret: who uses it must prove its key."""
        return self._derive(f"pair {min(one, other)} {max(one, other)}")

    def leg(self, worker: int, other: int) -> bytes:
        """Return the route of the connection between a worker and the client that relays it to another worker."""
        return self._derive(f"leg {worker} {other}")

    def routes(self, worker: int) -> dict[bytes, int]:
        """Return the routes on which a server's connections may arrive, with the worker at the other end."""
        found = {self.route(worker, other): other for other in range(len(self.entries)) if other != worker}
        return found | {self.leg(worker, other): other for other in range(1, len(self.entries)) if other != worker}

    def pairs(self) -> list[tuple[int, int]]:
        """Return all pairs of servers, the lower number first."""
        return list(combinations(range(1, len(self.entries)), 2))

    def to_probe(self, worker: int) -> dict[int, tuple[str, int]]:
        """Return the addresses of the other servers, of those that have one."""
        return {
            other: (each.host, each.port)
            for other, each in enumerate(self.entries)
            if other not in (0, worker) and each.host is not None
        }

    def dialers(self, reached: Mapping[int, Iterable[int]]) -> Dialers:
        """Return who dials in each pair of servers, given the servers that each has reached: the higher if it can."""
        found = {worker: set(others) for worker, others in reached.items()}
        return {
            (low, high): high if low in found.get(high, ()) else low if high in found.get(low, ()) else None
            for low, high in self.pairs()
        }

    def group(self, name: str, numbers: Sequence[int]) -> Roster:
        """Return the roster of a group of these workers; its routes depend on ``name``."""
        run = hashlib.sha256(bytes.fromhex(self.run) + name.encode()).hexdigest()[: len(self.run)]
        return Roster(run, tuple(self.entries[number] for number in numbers))

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in self.entries]

    @staticmethod
    def from_json(run: str, entries: Sequence[Any]) -> Roster:
        """Return the roster of an offer; raise ValueError unless every worker has a name and a fingerprint."""
        found = tuple(from_facts(RosterEntry, each, "the workers of an offer") for each in entries)
        for each in found:
            if len(bytes.fromhex(each.fingerprint)) != 32 or not 0 <= each.port < 1 << 16:
                raise ValueError(f"the entry of {one_line(each.name)[:60]} has no fingerprint, or no valid port")
        return Roster(run, found)

    def _derive(self, what: str) -> bytes:
        return hashlib.sha256(bytes.fromhex(self.run) + what.encode()).digest()[:ROUTE_BYTES]


def dialers_of(numbers: Sequence[int], dialers: Dialers) -> Dialers:
    """Return who dials in each pair of a group of these workers, by their numbers in the group."""
    found = {}
    for low, high in combinations(range(1, len(numbers)), 2):
        dialer = dialers[min(numbers[low], numbers[high]), max(numbers[low], numbers[high])]
        found[low, high] = None if dialer is None else list(numbers).index(dialer)
    return found


def dialers_json(dialers: Dialers) -> dict[str, int | None]:
    return {f"{low}-{high}": dialer for (low, high), dialer in dialers.items()}


def parse_dialers(facts: Any, roster: Roster) -> Dialers:
    """Return who dials in each pair of servers; raise ValueError for other workers."""
    expected = {f"{low}-{high}": (low, high) for low, high in roster.pairs()}
    if not isinstance(facts, dict) or facts.keys() != expected.keys():
        raise ValueError("a start names the pairs of servers, and these are others")
    found = {}
    for name, pair in expected.items():
        if facts[name] is not None and facts[name] not in pair:
            raise ValueError(f"the connection of workers {name} is dialled by one of them, got {facts[name]!r}"[:200])
        found[pair] = facts[name]
    return found
