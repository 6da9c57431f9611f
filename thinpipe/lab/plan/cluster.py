"""Clusters: machines with speed and memory, and the links between them, from a TOML file.

[machines.home]             # the first machine is the client, which has the data
tflops = 0.5                # that training achieves, not the peak
memory = "16GiB"
down = "100mbit"            # optional: the rates of its connection, shared by all of its links
up = "20mbit"

[machines.lab]
count = 3                   # lab-0, lab-1, lab-2
tflops = 40
memory = "80GiB"
device = "cuda"

[links]
default = "1gbit,1ms"       # every pair without a line of its own
"home - lab" = "100mbit/20mbit,15ms,0.1%"   # to home / from home, one-way delay, loss
"lab - lab" = "10gbit,0.1ms"
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thinpipe.options import OptionError, nearest
from thinpipe.system.files import read_toml
from thinpipe.system.sizes import parse_size
from thinpipe.train.engines.simulator import LinkCost
from thinpipe.train.shaping import Queue, Shape, parse_link

SHIPPED = Path(__file__).parent / "clusters"
_MOST_MACHINES = 4096
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
_PACKET_BYTES = 1500
_KEYS = {
    "count": "a whole number",
    "tflops": "a number above 0",
    "memory": "a size",
    "device": "cpu or cuda",
    "down": "a rate",
    "up": "a rate",
    "action_ms": "a number",
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine; its speed is stated, or relative to the machine on which the model was measured."""

    name: str
    tflops: float | None = None  # that training achieves; None: measured
    memory_bytes: int | None = None  # None: not limited
    device: Literal["cpu", "cuda"] = "cpu"
    down_mbit_per_s: float | None = None  # of its connection; None: only its links limit it
    up_mbit_per_s: float | None = None
    action_ms: float = 0.3  # overhead of one forward or backward of a stage
    kind: str = ""  # the table of the file it comes from


@dataclass(frozen=True)
class MachinePath:
    """The path from one machine to another."""

    queues: tuple[Queue, ...]
    delay_ms: float
    loss: float = 0.0

    def cost(self, wire_bytes: int) -> LinkCost:
        """Return the cost of a message; a lost packet delays it by a round trip."""
        packets = math.ceil(wire_bytes / _PACKET_BYTES)
        lost = 1 - (1 - self.loss) ** packets if self.loss else 0.0
        return LinkCost(self.queues, wire_bytes, self.delay_ms * (1 + 2 * lost))

    def wire_ms(self, wire_bytes: float) -> float:
        """Return the transmission time of bytes through the slowest queue."""
        return max((queue.wire_ms(wire_bytes) for queue in self.queues), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines and links; machine 0 is the client."""

    name: str
    machines: tuple[Machine, ...]
    links: Mapping[tuple[str, str], Shape]  # by kinds or names of machines; down is to the first
    default: Shape | None = None
    measured: Mapping[tuple[int, int], MachinePath] = field(default_factory=dict)  # of machines by number
    slowdown: Sequence[float] = ()  # by the number of workers that compute at a time, if one machine stands for all

    def path(self, source: int, target: int) -> MachinePath:
        """Return the path between two machines; raise OptionError if the file has no such link."""
        if (source, target) in self.measured:
            return self.measured[source, target]
        here, there = self.machines[source], self.machines[target]
        shape, is_down = self._shape(here, there)
        rate = shape.down_mbit_per_s if is_down else shape.up_mbit_per_s
        queues = [Queue(f"{here.name} to {there.name}", rate)]
        if here.up_mbit_per_s is not None:
            queues.append(Queue(f"{here.name} sends", here.up_mbit_per_s))
        if there.down_mbit_per_s is not None:
            queues.append(Queue(f"{there.name} receives", there.down_mbit_per_s))
        limited = tuple(queue for queue in queues if queue.mbit_per_s is not None)
        return MachinePath(limited, shape.delay_ms + shape.jitter_ms / 2, shape.loss)

    def _shape(self, here: Machine, there: Machine) -> tuple[Shape, bool]:
        """Return the shape of a pair, and whether its first machine is the receiver."""
        for one in (here.name, here.kind):
            for other in (there.name, there.kind):
                if (one, other) in self.links:
                    return self.links[one, other], False
                if (other, one) in self.links:
                    return self.links[other, one], True
        if self.default is None:
            raise OptionError(
                f"{self.name} has no link between {here.name} and {there.name}: add a line "
                f'"{here.kind} - {there.kind}" = "100mbit,10ms" to [links], or a default'
            )
        return self.default, True

    def delays_ms(self, machines: Sequence[int]) -> NDArray[np.float64]:
        """Return the delay of a small message from each of these machines (row) to each other."""
        known: dict[tuple[str, str], float] = {}
        found = np.zeros((len(machines), len(machines)))
        for row, source in enumerate(machines):
            for column, target in enumerate(machines):
                if source != target:
                    pair = self.machines[source].name, self.machines[target].name
                    found[row, column] = known.setdefault(pair, self.path(source, target).delay_ms)
        return found

    def scaled(self, *, rate: float = 1.0, delay: float = 1.0) -> Cluster:
        """Return the cluster with all rates and delays multiplied by factors."""

        def of(shape: Shape) -> Shape:
            down, up = (None if each is None else each * rate for each in (shape.down_mbit_per_s, shape.up_mbit_per_s))
            return replace(shape, down_mbit_per_s=down, up_mbit_per_s=up, delay_ms=shape.delay_ms * delay)

        def through(path: MachinePath) -> MachinePath:
            queues = tuple(Queue(each.name, each.mbit_per_s and each.mbit_per_s * rate) for each in path.queues)
            return MachinePath(queues, path.delay_ms * delay, path.loss)

        machines = tuple(
            replace(
                each,
                down_mbit_per_s=each.down_mbit_per_s and each.down_mbit_per_s * rate,
                up_mbit_per_s=each.up_mbit_per_s and each.up_mbit_per_s * rate,
            )
            for each in self.machines
        )
        links = {pair: of(shape) for pair, shape in self.links.items()}
        default = None if self.default is None else of(self.default)
        measured = {pair: through(path) for pair, path in self.measured.items()}
        return replace(self, machines=machines, links=links, default=default, measured=measured)


def shipped() -> list[str]:
    """Return the names of the clusters that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def read_cluster(name: str) -> Cluster:
    """Return the cluster of a TOML file, or of a shipped one by its name; raise OptionError if it is invalid."""
    path = Path(name)
    if not path.suffix and not path.exists():
        if name not in shipped():
            raise OptionError(
                f"{{cluster}} is a FILE.toml, or one of {', '.join(shipped())}; got {name}{nearest(name, shipped())}"
            )
        path = SHIPPED / f"{name}.toml"
    return parse_cluster(path.stem, read_toml(path, "machines and links"))


def parse_cluster(name: str, entries: Mapping[str, Any]) -> Cluster:
    """Return the cluster of a TOML document."""
    unknown = sorted(entries.keys() - {"machines", "links", "about"})
    kinds = entries.get("machines")
    if unknown or not isinstance(kinds, dict) or not kinds:
        what = f"not [{unknown[0]}]" if unknown else "with a machine or more"
        raise OptionError(f"{name}: a cluster has tables [machines.NAME] and [links], {what}")
    machines = [machine for kind, facts in kinds.items() for machine in _machines(name, kind, facts)]
    if len(machines) > _MOST_MACHINES:
        raise OptionError(f"{name}: a cluster has up to {_MOST_MACHINES} machines; got {len(machines)}")
    known = {each.name for each in machines} | set(kinds)
    links = dict(_links(name, entries.get("links", {}), known))
    default = links.pop(("default", "default"), None)
    return Cluster(name=name, machines=tuple(machines), links=links, default=default)


def _machines(name: str, kind: str, facts: Any) -> Iterator[Machine]:
    where = f"{name}: [machines.{kind}]"
    if not isinstance(facts, dict) or not _NAME.fullmatch(kind):
        raise OptionError(f"{where} is a table with a name of small letters, digits and dashes")
    for key, value in facts.items():
        if key not in _KEYS:
            raise OptionError(f"{where} has {key}{nearest(key, _KEYS)}; it may have {', '.join(_KEYS)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        valid = {
            "count": type(value) is int and 1 <= value <= _MOST_MACHINES,
            "tflops": is_number and value > 0,
            "device": value in ("cpu", "cuda"),
            "action_ms": is_number and value >= 0,
        }.get(key, isinstance(value, str))
        if not valid:
            raise OptionError(f"{where} {key} is {_KEYS[key]}; got {value!r}")
    if "tflops" not in facts:
        raise OptionError(f"{where} has no tflops: the float operations a second, in 10^12, that training achieves")
    rates = {key: _rate(where, key, facts[key]) for key in ("down", "up") if key in facts}
    machine = Machine(
        name=kind,
        tflops=float(facts["tflops"]),
        memory_bytes=parse_size(facts["memory"]) if "memory" in facts else None,
        device=facts.get("device", "cpu"),
        down_mbit_per_s=rates.get("down"),
        up_mbit_per_s=rates.get("up"),
        action_ms=float(facts.get("action_ms", Machine.action_ms)),
        kind=kind,
    )
    count = facts.get("count", 1)
    yield from [machine] if count == 1 else (replace(machine, name=f"{kind}-{number}") for number in range(count))


def _rate(where: str, key: str, text: str) -> float:
    shape = _shape(f"{where} {key}", text)
    if shape.down_mbit_per_s is None or shape != Shape(shape.down_mbit_per_s, shape.down_mbit_per_s):
        raise OptionError(f"{where} {key} is a rate, as in 100mbit; got {text!r}")
    return shape.down_mbit_per_s


def _links(name: str, entries: Any, known: set[str]) -> Iterator[tuple[tuple[str, str], Shape]]:
    if not isinstance(entries, dict):
        raise OptionError(f'{name}: [links] has lines as "home - lab" = "100mbit/20mbit,15ms"')
    for key, value in entries.items():
        pair = tuple(part.strip() for part in key.split(" - "))
        if key == "default":
            pair = ("default", "default")
        elif len(pair) != 2 or not set(pair) <= known:
            unknown = next((each for each in pair if each not in known), key)
            raise OptionError(
                f'{name}: [links] "{key}" joins machines of the file, as in "a - b"; {unknown} is none of them'
                f"{nearest(unknown, known)}"
            )
        yield (pair[0], pair[1]), _shape(f'{name}: [links] "{key}"', value)


def _shape(where: str, text: Any) -> Shape:
    try:
        shaping = parse_link(text) if isinstance(text, str) and ".toml" not in text else _not_text(text)
    except OptionError as error:
        raise OptionError(f"{where}: {error.args[0].replace('{link}', 'a link')}") from None
    return Shape() if shaping is None else shaping.every


def _not_text(text: Any) -> Any:
    raise OptionError(f"a link is a text, as in 100mbit/20mbit,15ms; got {text!r}")
