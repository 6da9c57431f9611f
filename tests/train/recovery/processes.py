"""The simulated processes: servers and clients that carry out the actions of the state machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.train.recovery.driver import MemberDriver
from thinpipe.train.recovery import messages as wire
from thinpipe.train.recovery.coordinator import CoordinatorMachine

if TYPE_CHECKING:
    from tests.train.recovery.simulator import World

LOST_S, FORM_S, RETURN_S, END_S = 4.0, 6.0, 5.0, 30.0
FREE_S = 14.0  # for a server that has left a run to be started again and chosen


class Host:
    """A process that can be paused, killed and started again."""

    name: str
    member: MemberDriver | None
    last_step: int | None = None  # of a client

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_alive = False
        self.paused_until = self.offset = self.slow_until = self.healthy_since = self.heard_at = 0.0
        self.fails_loading = 0
        self.is_zombie = False
        self.zombie: Host | None = None  # an older process with the same connection

    def clock(self) -> float:
        return self.world.now + self.offset

    def hear(self, message: Any) -> None:
        raise NotImplementedError

    def die(self, *, is_silent: bool) -> None:
        raise NotImplementedError

    def start_again(self) -> None:
        raise NotImplementedError

    def member_ends(self) -> None:
        raise NotImplementedError

    def completes(self, attempt: int) -> None:
        raise NotImplementedError


class Server(Host):
    """A server: a supervisor that starts a process, and another one when that has ended."""

    def __init__(self, world: World, name: str, zombie: Host | None = None) -> None:
        super().__init__(world)
        self.name, self.member, self.zombie = name, None, zombie
        self._generation = 0
        self.start_again()

    def start_again(self) -> None:
        if self.is_alive or self.is_zombie:
            return
        self._generation += 1
        self._is_leaving = False
        self.is_alive, self.paused_until, self.healthy_since = True, 0.0, self.world.now
        life = int(self.world.random() * (1 << 62)) + 1
        self.member = MemberDriver(self.world, self, self.name, life)
        self.world.at(self.world.random() * 0.5, self, self._tick, self._generation)

    def _tick(self, generation: int) -> None:
        if generation == self._generation and self.member is not None:
            self.member.do(self.member.machine.tick(self.clock()))
            self.world.at(self.world.beat_s, self, self._tick, generation)

    def leave(self) -> None:
        self._is_leaving = True
        if self.member is not None:
            self.member.do(self.member.machine.leave(self.clock()))

    def hear(self, order: wire.Order) -> None:
        if self.member is not None:
            if self.member.machine.run in ("", order.run):
                self.heard_at = self.world.now
            self.member.hear(order)

    def is_free_for(self, run: str) -> bool:
        """Return False if it takes part in another run; it leaves that after its patience without an order."""
        if self.member is None or self.fails_loading:
            return False
        is_left = self.world.now - self.heard_at > self.world.patience_s + FREE_S
        return is_left or self.member.machine.run in ("", run)

    def die(self, *, is_silent: bool) -> None:
        member, world = self.member, self.world
        self.is_alive, self.member = False, None
        if member is None:
            return
        for other in member.close():
            world.at(3.0 if is_silent else 0.01, other.host, other.unreachable, self.name)
        if not is_silent:
            for client in world.clients:
                world.at(0.05, client, client.lost, self.name, member.life)

    def member_ends(self) -> None:
        """End the process of a run; the supervisor starts the next one."""
        self.die(is_silent=False)
        self.world.at(4 * self.world.random() if self._is_leaving else 0.5, None, self.start_again)


class Client(Host):
    """The client: the coordinator, the store of snapshots, and a member of its own."""

    def __init__(self, world: World, run: str, servers: int, least: int, last_step: int) -> None:
        super().__init__(world)
        self.name, self.run, self.last_step = "client", run, last_step
        self._wanted = servers, least
        self.is_done = False
        self._open()

    def _open(self) -> None:
        world = self.world
        servers, least = self._wanted
        first = 0 if self.run.startswith("rival") else world.checkpoint
        times = {"beat_s": world.beat_s, "lost_s": LOST_S, "form_s": FORM_S, "return_s": RETURN_S, "end_s": END_S}
        self.machine = CoordinatorMachine(wire.Policy(self.run, servers, least, world.cuts, first, **times))
        self.store: dict[wire.SnapshotId, dict[str, tuple[int, ...]]] = {}
        self.is_alive, self.paused_until = True, 0.0
        self.member: MemberDriver = MemberDriver(world, self, "client", int(world.random() * (1 << 62)) + 1)
        world.at(0.0, self, self._tick, self.run)

    def start_again(self) -> None:
        """Start the client again, which resumes from its checkpoint; it is another run for the servers."""
        if self.is_alive or self.is_done:
            return
        self.run += "+"
        self._open()

    def _tick(self, run: str) -> None:
        if run != self.run:
            return
        self.do(self.machine.tick(self.clock()))
        self.member.do(self.member.machine.tick(self.clock()))
        if self.machine.over:
            self.die(is_silent=True)
        self.world.at(self.world.beat_s, self, self._tick, run)

    def lost(self, name: str, life: int) -> None:
        self.do(self.machine.lost(self.clock(), name, life, "killed by signal 9"))

    def die(self, *, is_silent: bool) -> None:
        self.is_alive = False
        self.world.is_over |= self.is_done and self is self.world.clients[0]
        for other in self.member.close():
            self.world.at(3.0 if is_silent else 0.01, other.host, other.unreachable, "client")

    def hear(self, report: wire.Report) -> None:
        self.do(self.machine.receive(self.clock(), report))

    def do(self, actions: list[wire.CoordinatorAction]) -> None:
        world = self.world
        for action in actions:
            kind = type(action)
            if kind is wire.SendTo:
                name, order = action  # type: ignore[misc]
                if name == "client":
                    world.at(0.0, self, self.member.hear, order)
                else:
                    world.deliver("client", world.servers[name], order)
            elif world.log is not None and kind is wire.Notice:
                world.log(f"{world.now:7.3f} {self.run}: {action.text}")  # type: ignore[union-attr]
            elif kind is wire.Keep:
                self._committed(action.snapshot)  # type: ignore[union-attr]
            elif kind is wire.End:
                self.is_done = True
                world.ends(self, action.cause, action.code)  # type: ignore[union-attr]

    def _committed(self, snapshot: wire.SnapshotId) -> None:
        members = self.world.groups[self.run, snapshot.attempt][0]
        found = self.store.get(snapshot, {})
        self.world.commits(snapshot.step, [found.get(name, ()) for name in members])
        self.store = {each: parts for each, parts in self.store.items() if each >= snapshot}

    def keeps(self, name: str, snapshot: wire.SnapshotId, part: tuple[int, ...]) -> None:
        """Store a copy that has arrived; a torn one is found by its hash."""
        world = self.world
        if world.now < min(max(world.disk_until, world.torn_until), world.quiet_s):
            self.do(self.machine.mirror_failed(self.clock(), name, snapshot, "no space left on device"))
            return
        self.store.setdefault(snapshot, {})[name] = part
        self.do(self.machine.mirrored(self.clock(), name, snapshot))

    def member_ends(self) -> None:
        self.member.close()

    def completes(self, attempt: int) -> None:
        """End the run after its last step, with the states of all members."""
        member = self.member
        if member.form is None or member.form.attempt != attempt or not member.is_running:
            return
        if len(member.links) < len(member.form.members) - 1:
            return
        assert self.last_step is not None
        self.world.commits(self.last_step, [each.part for each in member.group()])
        self.do(self.machine.finished(self.clock()))
