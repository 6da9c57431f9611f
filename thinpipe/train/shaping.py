"""Traffic shaping of links between workers: rates, delay and loss, as text or per pair of workers in a file.

100mbit                          a rate in both directions
100mbit/20mbit,40ms,0.1%         100 Mbit/s to the client and 20 from it, 40 ms each way, one packet in 1000 lost
40-45ms                          a delay that differs from packet to packet; packets stay in order
links.toml                       default = "1gbit,5ms", "0-1" = "100mbit/20mbit,40ms": pairs of ranks
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from thinpipe.options import OptionError
from thinpipe.system.files import read_toml

# tc accepts 136 bit/s to 670 Gbit/s: below, the time of a burst overflows its 32 bits, and the burst is smaller than a
# frame; above, the queue in bytes overflows them.
_LEAST_MBIT, _MOST_MBIT = 1e-3, 600e3
_MOST_DELAY_MS = 10_000.0  # TCP gives up on a connection that takes minutes to establish
_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)?")  # without a unit: Mbit/s
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?(us|ms|s)")
_LOSS = re.compile(r"(\d+(?:\.\d+)?)%")
# MTU of links that one Python process forwards: that of Ethernet, and above this rate a larger one so it keeps up.
_FAST_MBIT, _MTU, _FAST_MTU = 300.0, 1500, 9000
# A router's queue: 100 ms, or a round trip if that is longer; and at least an initial burst of packets.
_MAX_WAIT_S, _MIN_PACKETS = 0.1, 16


@dataclass(frozen=True)
class Shape:
    """The shaping of the link between two workers. Down is towards the lower rank, as for the client."""

    down_mbit_per_s: float | None = None  # None: unlimited
    up_mbit_per_s: float | None = None
    delay_ms: float = 0.0  # one way, at least
    jitter_ms: float = 0.0  # the most that is added to the delay
    loss: float = 0.0  # fraction of the packets

    @property
    def text(self) -> str:
        """The text that ``parse_link`` reads."""
        rates = list(dict.fromkeys((self.down_mbit_per_s, self.up_mbit_per_s)))
        up_to = f"-{self.delay_ms + self.jitter_ms:.12g}" if self.jitter_ms else ""
        parts = [
            "" if rates == [None] else "/".join(map(_rate_text, rates)),
            f"{self.delay_ms:.12g}{up_to}ms" if self.delay_ms or self.jitter_ms else "",
            f"{100 * self.loss:.12g}%" if self.loss else "",
        ]
        return ",".join(filter(None, parts)) or "none"


@dataclass(frozen=True)
class Queue:
    """A queue that packets leave at a fixed rate."""

    name: str
    mbit_per_s: float | None  # None: unlimited

    def wire_ms(self, wire_bytes: float) -> float:
        """Return the transmission time of ``wire_bytes`` bytes."""
        return 0.0 if self.mbit_per_s is None else wire_bytes * 8 / (self.mbit_per_s * 1e3)


@dataclass(frozen=True)
class LinkPath:
    """The queues and shape of the path from one worker to another."""

    queues: tuple[Queue, ...]
    shape: Shape

    @property
    def mtu(self) -> int:
        """The largest packet, in bytes: the same in both directions."""
        rates = (self.shape.down_mbit_per_s, self.shape.up_mbit_per_s)
        return _FAST_MTU if any(rate is None or rate >= _FAST_MBIT for rate in rates) else _MTU

    def max_wait_s(self, queue: Queue) -> float:
        """Return the longest time that a packet may wait in a queue, in seconds."""
        assert queue.mbit_per_s is not None
        packets_s = _MIN_PACKETS * self.mtu * 8 / (queue.mbit_per_s * 1e6)
        return max(_MAX_WAIT_S, 2e-3 * self.shape.delay_ms, packets_s)


@dataclass(frozen=True)
class Shaping:
    """The links of all workers: one shape for all, or one for each pair."""

    every: Shape
    pairs: tuple[tuple[tuple[int, int], Shape], ...] = ()  # lower number first
    file: str | None = None  # the file that they were read from

    @property
    def plain_mbit_per_s(self) -> float | None:
        """The rate of links with only a rate, equal in both directions; None for others."""
        rate = self.every.down_mbit_per_s
        return rate if self.file is None and self.every == Shape(rate, rate) else None

    @property
    def text(self) -> str:
        return self.every.text if self.file is None else self.file

    @property
    def facts(self) -> float | str | dict[str, str]:
        """The entry in a record: the rate in Mbit/s if that is all, the text, or the contents of the file."""
        if self.file is None:
            return self.plain_mbit_per_s or self.text
        pairs = {f"{first}-{second}": shape.text for (first, second), shape in self.pairs}
        return {"file": self.file, "default": self.every.text, **pairs}

    def check(self, workers: int) -> None:
        """Raise OptionError if a pair names a rank that does not exist."""
        for (first, second), _ in self.pairs:
            if second >= workers:
                raise OptionError(
                    f"{{link}} {self.file} has a link of the pair {first}-{second}, and workers are numbered from 0 to "
                    f"{workers - 1}: leave the pair out, or start more workers"
                )

    def paths(self, workers: int) -> dict[tuple[int, int], LinkPath]:
        """Return the path of each pair of workers, by sender and receiver.

        With two workers, or with a file, every pair has its own link. Otherwise each worker has one interface for all
        its links: the client's receives at the rate down and sends at the rate up; those of the others have the higher
        rate in both directions.
        """
        shapes, fast = dict(self.pairs), _faster(self.every)
        found = {}
        for source, target in permutations(range(workers), 2):
            shape = shapes.get((min(source, target), max(source, target)), self.every)
            if workers > 2 and self.file is None:
                queues: tuple[Queue, ...] = (
                    Queue(f"{source} sends", fast if source else shape.up_mbit_per_s),
                    Queue(f"{target} receives", fast if target else shape.down_mbit_per_s),
                )
            else:
                rate = shape.down_mbit_per_s if target < source else shape.up_mbit_per_s
                queues = (Queue(f"{source} to {target}", rate),)
            found[source, target] = LinkPath(queues, shape)
        return found


def shaping_of(mbit_per_s: float) -> Shaping:
    """Return the shaping of links that have only a rate."""
    return Shaping(Shape(mbit_per_s, mbit_per_s))


def parse_link(text: str) -> Shaping | None:
    """Return the shaping that a text describes; None for ``none``, without shaping."""
    links = parse_links(text)
    if len(links) > 1:
        raise _not_a_link(text)
    return links[0]


def parse_links(text: str) -> list[Shaping | None]:
    """Return the shapings of a list separated by commas; a delay or a loss belongs to the item before it."""
    groups: list[list[str]] = []
    for part in (part.strip() for part in text.split(",")):
        if groups and (_DELAY.fullmatch(part.lower()) or _LOSS.fullmatch(part.lower())):
            groups[-1].append(part)
        else:
            groups.append([part])
    return list(dict.fromkeys(_parse_group(group) for group in groups))


def link_text(links: Shaping | None) -> str:
    """Return links as the text that ``parse_link`` reads."""
    return "none" if links is None else links.text


def link_facts(links: Shaping | None) -> dict[str, Any]:
    """Return the entries of a record: the rate in Mbit/s, and the full shaping if it is more than a rate."""
    rate = None if links is None else links.plain_mbit_per_s
    return {"link_mbit_per_s": rate, **({} if links is None or rate is not None else {"link": links.facts})}


def list_facts(several: Sequence[Shaping | None]) -> list[Any]:
    """Return the entries of a record for a list of shapings."""
    return [None if links is None else links.facts for links in several]


def _parse_group(parts: Sequence[str]) -> Shaping | None:
    if parts[0].endswith(".toml"):
        if len(parts) > 1:
            raise OptionError(f"{{link}} {parts[0]} has all of its links: write {', '.join(parts[1:])} into the file")
        return _read_file(parts[0])
    shape = _parse_shape(",".join(parts))
    return None if shape == Shape() else Shaping(shape)


def _parse_shape(text: str) -> Shape:
    first, *rest = text.strip().lower().split(",")
    shape = Shape()
    if _DELAY.fullmatch(first) or _LOSS.fullmatch(first):
        rest = [first, *rest]
    elif first != "none":
        rates = [_parse_rate(rate, text) for rate in first.split("/")]
        if len(rates) > 2:
            raise _not_a_link(text)
        shape = Shape(rates[0], rates[-1])
    for part in (part.strip() for part in rest):
        delay, loss = _DELAY.fullmatch(part), _LOSS.fullmatch(part)
        if delay and not (shape.delay_ms or shape.jitter_ms):
            least = float(delay[1]) * _MS[delay[3]]
            most = float(delay[2]) * _MS[delay[3]] if delay[2] else least
            if not least <= most <= _MOST_DELAY_MS:
                raise _not_a_link(text)
            shape = replace(shape, delay_ms=least, jitter_ms=most - least)
        elif loss and not shape.loss and float(loss[1]) < 100:
            shape = replace(shape, loss=float(loss[1]) / 100)
        else:
            raise _not_a_link(text)
    return shape


def _parse_rate(text: str, link: str) -> float:
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) * _MBIT[match[2] or "mbit"] if match else 0.0
    if not _LEAST_MBIT <= rate <= _MOST_MBIT:
        raise _not_a_link(link)
    return rate


def _read_file(name: str) -> Shaping:
    entries = read_toml(Path(name), "links of pairs of workers")
    shapes = dict(_file_entries(name, entries))
    default = shapes.pop((), Shape())
    return Shaping(default, tuple(sorted(shapes.items())), file=name)  # type: ignore[arg-type]


def _file_entries(name: str, entries: dict[str, Any]) -> Iterator[tuple[tuple[int, ...], Shape]]:
    for key, value in entries.items():
        pair = re.fullmatch(r"(\d{1,4})-(\d{1,4})", key)
        if not isinstance(value, str) or (key != "default" and (pair is None or int(pair[1]) >= int(pair[2]))):
            raise OptionError(
                f'{{link}} {name} has lines as default = "1gbit,5ms" and "0-1" = "100mbit/20mbit,40ms,0.1%", the lower '
                f"number of the pair first; got {key} = {value!r}"
            )
        try:
            yield (() if pair is None else (int(pair[1]), int(pair[2]))), _parse_shape(value)
        except OptionError as error:
            raise OptionError(f"{{link}} {name}, {key}: {error.args[0]}") from None


def _faster(shape: Shape) -> float | None:
    rates = (shape.down_mbit_per_s, shape.up_mbit_per_s)
    return None if None in rates else max(rate for rate in rates if rate is not None)


def _rate_text(mbit_per_s: float | None) -> str:
    assert mbit_per_s is not None
    return f"{mbit_per_s / 1e3:.12g}gbit" if mbit_per_s >= 1e3 else f"{mbit_per_s:.12g}mbit"


def _not_a_link(text: str) -> OptionError:
    return OptionError(
        "{link} is a rate from 1kbit to 600gbit, or two as down/up, and may have a delay of up to 10s and a loss of "
        f"packets, as in 100mbit or 100mbit/20mbit,40ms,0.1%; or none; or a file.toml; got {text[:40]!r}"
    )
