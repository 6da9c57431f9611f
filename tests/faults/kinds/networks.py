"""Networks between a client and its servers that break, change, forget, slow down or corrupt."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tests.faults.expected import END_S, Expected, Result
from tests.faults.fault import Fault, Missed, starting
from tests.faults.kinds.flaps import Lengths
from tests.faults.moments import Moment, draw_moment
from tests.faults.runs import PATIENCE_S, STEPS_PER_EPOCH, How, Run, Setting
from tests.faults.served import RunWithServers
from tests.train.serve.proxy import Proxy

PHASES = ("step", "save", "evaluation")
_STEP_RATE = 2_000_000  # bytes per second: connections break in the middle of steps and of checkpoints


def draw_how(random: random.Random) -> How:
    return random.choice(("serve", "listen"))


def proxy_of(run: Run, server: int) -> Proxy:
    assert isinstance(run, RunWithServers)
    return run.proxy(server)


def network_fault(
    random: random.Random,
    setting: Setting,
    words: str,
    strike: Callable[[Proxy], None],
    expected: Expected = Expected("must"),  # noqa: B008
) -> Fault:
    """Return a fault of the network of one server."""
    server, moment = random.randrange(1, setting.workers), draw_moment(random, phases=PHASES)
    return Fault(
        words=f"{words}, server {server}, {moment}",
        strike=lambda run: strike(proxy_of(run, server)),
        moment=moment,
        expected=expected,
        start=starting(),
        how=draw_how(random),
    )


def draw_reset(random: random.Random, setting: Setting) -> Fault:
    """Connections are reset, once or some times."""
    pauses = [random.uniform(0, 0.5) for _ in range(random.randint(1, 6))]

    def strike(proxy: Proxy) -> None:
        for pause_s in pauses:
            proxy.cut()
            time.sleep(pause_s)

    return network_fault(random, setting, f"connections reset {len(pauses)} times", strike)


def draw_outage(random: random.Random, setting: Setting) -> Fault:
    """No connection is possible, for a while or for good; or nothing arrives, without an error."""
    for_good, silent = random.random() < 0.25, random.random() < 0.5
    down_s = random.uniform(0.5, 0.5 * PATIENCE_S)

    def strike(proxy: Proxy) -> None:
        change = proxy.set_silent if silent else proxy.set_down
        change(True)
        if not for_good:
            time.sleep(down_s)
            change(False)

    what = "nothing arrives" if silent else "no connection"
    words = f"{what} {'for good' if for_good else f'for {down_s:.1f} s'}"
    # A silence is noticed first, and then a connection is tried for its own time.
    ends = Expected("must not", frozenset({1}), cause=r"worker \d", within_s=2 * PATIENCE_S + END_S)
    return network_fault(random, setting, words, strike, ends if for_good else Expected("must"))


def draw_address(random: random.Random, setting: Setting) -> Fault:
    """The address of one side changes: its connections are forgotten, or reset."""
    silent = random.random() < 0.5

    def strike(proxy: Proxy) -> None:
        change_address(proxy, silent=silent)

    return network_fault(random, setting, f"another address, {'silently' if silent else 'with a reset'}", strike)


def change_address(proxy: Proxy, *, silent: bool) -> None:
    proxy.change_address()
    (proxy.forget if silent else proxy.cut)()


def draw_slow(random: random.Random, setting: Setting) -> Fault:
    """A link that slows down under way."""
    rate = random.choice((200_000, 500_000, 2_000_000))

    def strike(proxy: Proxy) -> None:
        proxy.rate = rate

    return network_fault(random, setting, f"{rate // 1000} kB/s from then on", strike)


def draw_corrupt(random: random.Random, setting: Setting) -> Fault:
    """Bytes that are changed on the way: flipped bits, lost, repeated, exchanged or inserted bytes."""
    name = random.choice(list(_CHANGES))
    places = [random.randint(0, 150_000) for _ in range(random.randint(1, 12))]
    drawn = type(random)(random.getrandbits(32))

    def strike(proxy: Proxy) -> None:
        proxy.change = _Corruption(_CHANGES[name], places, drawn)

    return network_fault(random, setting, f"{name}, {len(places)} times", strike)


class _Corruption:
    """Changes the pieces that pass after some numbers of bytes."""

    def __init__(
        self, change: Callable[[bytes, random.Random], bytes], places: list[int], drawn: random.Random
    ) -> None:
        self._change, self._places, self._drawn = change, list(places), drawn
        self._passed, self._lock = 0, threading.Lock()

    def __call__(self, data: bytes) -> bytes:
        with self._lock:
            self._passed += len(data)
            if not self._places or self._passed < self._places[0]:
                return data
            self._places.pop(0)
            self._passed = 0
            return self._change(data, self._drawn)


def _flip(data: bytes, drawn: random.Random) -> bytes:
    changed = bytearray(data)
    changed[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    return bytes(changed)


def _lose(data: bytes, drawn: random.Random) -> bytes:
    start, end = sorted(drawn.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:]


def _repeat(data: bytes, drawn: random.Random) -> bytes:
    at = drawn.randrange(len(data))
    return data[:at] + data


def _exchange(data: bytes, drawn: random.Random) -> bytes:
    at = drawn.randrange(len(data))
    return data[at:] + data[:at]


def _insert(data: bytes, drawn: random.Random) -> bytes:
    at = drawn.randrange(len(data))
    return data[:at] + drawn.randbytes(drawn.randint(1, 2000)) + data[at:]


_CHANGES = {
    "a bit flipped": _flip,
    "bytes lost": _lose,
    "bytes repeated": _repeat,
    "bytes exchanged": _exchange,
    "junk inserted": _insert,
}


def draw_breaks(random: random.Random, setting: Setting, lengths: Lengths) -> Fault:
    """Connections cut and addresses changed in the middle of steps, again and again."""
    kinds = [random.choice(("cut", "cut", "address", "address silently")) for _ in range(lengths.flaps)]
    servers = [random.randrange(1, setting.workers) for _ in kinds]
    pauses = [random.uniform(0, 0.4) for _ in kinds]

    def start(run: Run) -> None:
        starting()(run)
        for server in range(1, setting.workers):
            proxy_of(run, server).rate = _STEP_RATE

    def strike(run: Run) -> None:
        for kind, server, pause_s in zip(kinds, servers, pauses, strict=True):
            step = run.steps()[-1]
            time.sleep(pause_s)
            if run.is_over:
                raise Missed
            if kind == "cut":
                proxy_of(run, server).cut()
            else:
                change_address(proxy_of(run, server), silent=kind != "address")
            until = time.monotonic() + 2 * PATIENCE_S
            while run.steps()[-1] == step and not run.is_over and time.monotonic() < until:
                time.sleep(0.01)

    def also(run: Run, result: Result) -> None:
        connections = [proxy_of(run, server).connections for server in range(1, setting.workers)]
        result.measured.append(
            f"{kinds.count('cut')} cuts, {len(kinds) - kinds.count('cut')} changes of an address; "
            f"connections by server: {connections}"
        )

    return Fault(
        words=f"{len(kinds)} connections cut or addresses changed, one a step",
        strike=strike,
        moment=Moment("step", 1, 0.0),
        expected=Expected("must"),
        start=start,
        how=draw_how(random),
        setting=replace(setting, codec="8bit", epochs=2 + -(-len(kinds) // STEPS_PER_EPOCH)),
        also=also,
    )
