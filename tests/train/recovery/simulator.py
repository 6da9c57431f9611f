"""A deterministic simulator of recovery: the real state machines, in virtual time, with the faults that a seed chooses.

    python -m tests.train.recovery.simulator --seed 17 --verbose       # repeats one run and prints its events
    python -m tests.train.recovery.simulator --runs 20000 --jobs 2     # many; prints those that fail

The training state is a chain of hashes per unit of the model: a step that is left out, applied twice, or applied to
states of different steps changes all that follow. The faults stop at `QUIET_S`; then the run must come to its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

from tests.train.recovery.driver import MemberDriver
from tests.train.recovery.processes import Client, Host, Server

KINDS = (
    *("loss", "late", "repeat", "cut", "pause", "crash", "client", "disk", "torn", "memory", "clock", "leave", "load"),
    *("slow", "rival", "zombie"),
)
HARMLESS = {"leave", "repeat", "clock", "rival"}  # no step is replayed because of them
UNITS = 6
QUIET_S = 14.0
HEALTHY_S = 14.0  # for which a server must have been reachable to count as one that the run could have used
BOUND_S = 120.0  # after the last fault, for the run to end


class Violation(AssertionError):
    """An invariant that did not hold."""


def advance(state: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Return the state of all units after a step; each depends on all of them before it."""
    whole = hash(state)
    return tuple(hash((each, whole, step, unit)) for unit, each in enumerate(state))


REFERENCE = [tuple(range(1, UNITS + 1))]
for _step in range(1, 40):
    REFERENCE.append(advance(REFERENCE[-1], _step))
_REFERENCE = dict(pairwise(REFERENCE))


class World:
    """One run: its processes, network, faults and clock."""

    beat_s, patience_s, quiet_s = 1.0, 12.0, QUIET_S

    def __init__(self, seed: int, kinds: set[str] | None = None, log: Callable[[str], None] | None = None) -> None:
        self.random = random.Random(seed).random
        self.log = log
        draw = self.random
        self.kinds = {kind for kind in KINDS if draw() < 0.3} if kinds is None else kinds
        self.now, self._count, self._sequence = 0.0, 0, 0
        self._heap: list[tuple[float, int, Host | None, Callable[..., None], tuple[Any, ...]]] = []
        self.servers_wanted = 2 + (draw() < 0.3)
        spares = int(draw() * 3)
        self.min_servers = self.servers_wanted - (draw() < 0.5)
        self.every = 2 + int(draw() * 3)
        self.last_step = 6 + int(draw() * 8)
        self.step_s = 0.1 + draw() * 0.6
        self.cuts = {n: tuple(UNITS * each // n for each in range(n + 1)) for n in range(1, 5)}
        self.cut_until: dict[tuple[str, str], float] = {}
        self.disk_until = self.torn_until = self.memory_until = 0.0
        self.loss = 0.3 * draw() if "loss" in self.kinds else 0.0
        self.late = 0.3 * draw() if "late" in self.kinds else 0.0
        self.repeat = 0.3 * draw() if "repeat" in self.kinds else 0.0
        self.victims: set[str] = set()
        self.executed: dict[tuple[str, int, int], int] = {}
        self.groups: dict[tuple[str, int], Any] = {}
        self.takers: dict[tuple[str, int, int], tuple[str, int]] = {}
        self.replayed, self.furthest = 0, 0
        self.checkpoint = 0
        self.last_fault = QUIET_S
        self._bases: dict[tuple[str, int], int] = {}
        self.is_over = False
        names = [f"server{n}" for n in range(1, self.servers_wanted + spares + 1)]
        self.servers = {name: Server(self, name) for name in names}
        self.clients: list[Client] = []
        self.clients.append(Client(self, "run", self.servers_wanted, self.min_servers, self.last_step))
        if self.loss or self.late:  # of heartbeats
            self.victims.update(names)
        self._crashes: list[int] = []
        self._plan_faults()

    # Time

    def at(self, delay: float, host: Host | None, call: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (self.now + delay, self._sequence, host, call, arguments))

    def run(self) -> None:
        heap, limit = self._heap, QUIET_S + BOUND_S
        crash_at = self._crashes.pop() if self._crashes else -1
        while not self.is_over:
            if not heap:
                raise Violation("nothing is left to happen")
            time, sequence, host, call, arguments = heappop(heap)
            if host is not None:
                if not host.is_alive:
                    continue
                if host.paused_until > time:
                    heappush(heap, (host.paused_until, sequence, host, call, arguments))
                    continue
            if time > limit:
                raise Violation(f"hang: the run has not ended {BOUND_S:.0f} s after the last fault")
            self.now = time
            self._count += 1
            if self._count >= crash_at >= 0 and host is not None and (host.name != "client" or "client" in self.kinds):
                crash_at = self._crashes.pop() if self._crashes else -1
                self.crash(host)
                continue
            call(*arguments)
        if self.replayed and self.kinds <= HARMLESS:
            raise Violation(f"{self.replayed} steps were replayed, although no server was lost")

    # Network

    def is_cut(self, one: str, other: str) -> bool:
        if not self.cut_until:
            return False
        pair = (one, other) if one < other else (other, one)
        return self.cut_until.get(pair, 0.0) > self.now

    def deliver(self, source: str, host: Host, message: Any) -> None:
        """Deliver a message: perhaps late, twice, or not at all."""
        call = host.hear
        if self.now < QUIET_S:
            if self.is_cut(source, host.name) or (self.loss and self.random() < self.loss):
                return
            if self.repeat and self.random() < self.repeat:
                self.at(self.random() * 6, host, call, message)
            if self.late and self.random() < self.late:
                self.at(self.random() * 6, host, call, message)
                return
        self.at(0.02, host, call, message)
        if host.zombie is not None:
            self.at(0.02, host.zombie, host.zombie.hear, message)

    def processes(self, run: str, name: str) -> list[MemberDriver]:
        """Return the processes that a connection to a name may reach now, the oldest first."""
        if name == "client":
            hosts: list[Host | None] = [each for each in self.clients if each.run == run]
        else:
            hosts = [self.servers[name].zombie, self.servers[name]]
        return [each.member for each in hosts if each is not None and each.is_alive and each.member is not None]

    # Faults

    def _plan_faults(self) -> None:
        draw = self.random
        timed = [kind for kind in KINDS[3:] if kind in self.kinds and kind not in ("crash", "client")]
        for kind in timed:
            for _ in range(1 + (draw() < 0.3)):
                self.at(draw() * 9, None, getattr(self, f"_fault_{kind}"))
        if "crash" in self.kinds or "client" in self.kinds:
            self._crashes = sorted((int(draw() * 500) for _ in range(1 + int(draw() * 3))), reverse=True)

    def _one(self, *, with_client: bool = False) -> Host:
        hosts: list[Host] = [*self.servers.values()]
        if with_client:
            hosts.append(self.clients[0])
        return hosts[int(self.random() * len(hosts))]

    def _fault_cut(self) -> None:
        one, other = self._one(with_client=True), self._one()
        if one.name == other.name:
            return
        pair = (one.name, other.name) if one.name < other.name else (other.name, one.name)
        seconds = self.random() * 5
        self.cut_until[pair] = max(self.cut_until.get(pair, 0.0), self.now + seconds)
        self._hit(f"no network for {seconds:.1f} s", one, other)
        for host, peer in ((one, other), (other, one)):
            if host.member is not None:
                self.at(3.0, host, host.member.unreachable, peer.name)

    def _fault_pause(self) -> None:
        host = self._one(with_client=True)
        seconds = self.random() * 12 if host.name != "client" else self.random() * 4
        host.paused_until = max(host.paused_until, self.now + min(seconds, QUIET_S - self.now))
        self._hit(f"paused for {seconds:.1f} s", host)
        for other in (*self.servers.values(), *self.clients):
            if other is not host and other.member is not None:
                self.at(3.0, other, other.member.unreachable, host.name)

    def crash(self, host: Host) -> None:
        self._hit("crashes", host)
        is_silent = self.random() < 0.5
        host.die(is_silent=is_silent)
        if host.name == "client" or self.random() < 0.7:
            self.at(0.3 + self.random() * 8, None, host.start_again)

    def _fault_disk(self) -> None:
        self.disk_until = self.now + self.random() * 4
        self._hit("cannot store snapshots", self.clients[0])

    def _fault_torn(self) -> None:
        self.torn_until = self.now + self.random() * 4
        self._hit("cannot store snapshots", self.clients[0])

    def _fault_memory(self) -> None:
        self.memory_until = self.now + self.random() * 4
        self._hit("have no memory for snapshots", self.clients[0], *self.servers.values())

    def _fault_clock(self) -> None:
        self._one(with_client=True).offset += (self.random() - 0.3) * 1000

    def _fault_leave(self) -> None:
        host = self._one()
        self._hit("is asked to leave", host)
        assert isinstance(host, Server)
        if host.is_alive:
            self.at(0.0, host, host.leave)

    def _fault_load(self) -> None:
        host = self._one()
        host.fails_loading = 1 + int(self.random() * 3)
        self._hit(f"fails to load {host.fails_loading} times", host)

    def _fault_slow(self) -> None:
        host = self._one()
        self._hit("is slow", host)
        host.slow_until = self.now + self.random() * 5

    def _fault_zombie(self) -> None:
        """Start a second process of a server, while the first is frozen; then both run."""
        host = self._one()
        assert isinstance(host, Server)
        if host.is_alive:
            self._hit("is started a second time", host)
            host.paused_until = max(host.paused_until, min(self.now + self.random() * 8, QUIET_S))
            host.is_zombie = True
            self.servers[host.name] = Server(self, host.name, host if self.random() < 0.5 else None)

    def _fault_rival(self) -> None:
        if len(self.clients) == 1:
            self.clients.append(Client(self, "rival", 1, 1, 3))

    def _hit(self, text: str, *hosts: Host) -> None:
        self.last_fault = max(self.last_fault, self.now)
        self.victims.update(host.name for host in hosts)
        if self.log is not None:
            self.log(f"{self.now:7.3f} FAULT {', '.join(host.name for host in hosts)}: {text}")

    # Invariants

    def joins(self, driver: MemberDriver, form: Any) -> None:
        """Check a group: the same for all its members, one process for a worker, one run for a process."""
        run = driver.machine.run
        if driver.run not in ("", run):
            raise Violation(f"{driver.name} takes part in {driver.run} and in {run}")
        driver.run = run
        group = form.members, form.lives, form.cut, form.base
        if self.groups.setdefault((run, form.attempt), group) != group:
            raise Violation(f"two decisions about attempt {form.attempt}")
        key = run, form.attempt, form.worker
        if self.takers.setdefault(key, (driver.name, driver.life)) != (driver.name, driver.life):
            raise Violation(f"two members are worker {form.worker} of attempt {form.attempt}")

    def starts(self, driver: MemberDriver, action: Any) -> None:
        """Check that all members of an attempt start from the same step, and one that is in their states."""
        base = self._bases.setdefault((driver.run, action.attempt), action.step)
        if not base == action.step == driver.step:
            raise Violation(f"{driver.name} starts attempt {action.attempt} from step {driver.step}, not {base}")

    def saves(self, client: Host, step: int) -> None:
        if client is self.clients[0]:
            self.checkpoint = step

    def start_of(self, step: int) -> tuple[int, ...]:
        return REFERENCE[step]

    def step(self, members: list[MemberDriver], run: str, attempt: int) -> None:
        """Apply one step to the states of a group."""
        whole = tuple(value for each in members for value in each.part)
        step = members[0].step + 1
        if len({each.step for each in members}) > 1 or whole not in _REFERENCE:
            raise Violation(f"step {step} of attempt {attempt} starts from states of different or wrong steps")
        if len({(each.machine.run, each.machine.attempt) for each in members}) > 1:
            raise Violation(f"step {step} of members of different runs or attempts")
        if (run, attempt, step) in self.executed:
            raise Violation(f"step {step} is applied twice in attempt {attempt}")
        self.executed[run, attempt, step] = 1
        if not run.startswith("rival"):
            self.replayed += step <= self.furthest
            self.furthest = max(self.furthest, step)
        after = _REFERENCE[whole]
        if after != REFERENCE[step]:
            raise Violation(f"step {step} starts from the state of another step")
        start = 0
        for each in members:
            each.part = after[start : start + len(each.part)]
            start += len(each.part)
            each.step = step

    def commits(self, step: int, parts: list[tuple[int, ...]]) -> None:
        if sum(parts, ()) != REFERENCE[step]:
            raise Violation(f"the committed snapshot of step {step} is mixed from different steps, or incomplete")

    def ends(self, client: Client, cause: str, code: int) -> None:
        if self.log is not None:
            self.log(f"{self.now:7.3f} END of {client.run}: code {code} {cause}")
        if client is not self.clients[0] or code == 0:
            return
        about = cause.split(":")[0].split(",")[0]
        if not self.victims or not (about in self.victims or "servers are needed" in about):
            raise Violation(f"the run ends because of {about}, which had no fault: {cause}")
        healthy = sum(
            each.is_alive and each.healthy_since + HEALTHY_S < self.now and each.is_free_for(client.run)
            for each in self.servers.values()
        )
        if self.now > self.last_fault + HEALTHY_S and healthy >= self.min_servers:
            raise Violation(f"the run ends although {healthy} servers were there: {cause}")


def main() -> None:
    import argparse
    import time
    from multiprocessing import Pool

    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    if given.seed is not None:
        world = World(given.seed, log=print if given.verbose else None)
        print(f"seed {given.seed}: {', '.join(sorted(world.kinds)) or 'no faults'}")
        world.run()
        print(f"ended after {world.now:.1f} s; {world.replayed} steps replayed")
        return
    began = time.perf_counter()
    chunks = [
        range(each, min(each + 1000, given.first + given.runs))
        for each in range(given.first, given.first + given.runs, 1000)
    ]
    failed = []
    with Pool(given.jobs) as pool:
        for found in pool.imap_unordered(failures, chunks):
            for seed, text in found:
                failed.append(seed)
                if len(failed) <= 20:
                    print(f"seed {seed}: {text}", flush=True)
    seconds = time.perf_counter() - began
    print(f"{given.runs} runs, {len(failed)} failed, {given.runs / seconds:.0f} runs/s with {given.jobs} processes")
    raise SystemExit(bool(failed))


def failures(seeds: range) -> list[tuple[int, str]]:
    """Return the seeds whose runs violate an invariant, with the violation."""
    found = []
    for seed in seeds:
        try:
            World(seed).run()
        except Exception as error:
            found.append((seed, f"{type(error).__name__}: {error}"))
    return found


if __name__ == "__main__":
    main()
