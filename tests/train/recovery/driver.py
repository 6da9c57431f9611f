"""The driver of a simulated member: it carries out the actions of its state machine in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinpipe.train.recovery import messages as wire
from thinpipe.train.recovery.member import MemberMachine

if TYPE_CHECKING:
    from tests.train.recovery.processes import Client, Host
    from tests.train.recovery.simulator import World

CONNECT_S = 3.0


class MemberDriver:
    """One life of a member: it carries out the actions of its machine."""

    def __init__(self, world: World, host: Host, name: str, life: int) -> None:
        self.world, self.host, self.name, self.life = world, host, name, life
        self.machine = MemberMachine(name, life, every=world.every, beat_s=world.beat_s, patience_s=world.patience_s)
        self.run = ""
        self.form: wire.FormGroup | None = None
        self.part: tuple[int, ...] = ()
        self.step = 0
        self.links: dict[str, MemberDriver] = {}
        self.is_loaded = self.is_running = self.is_waiting = self.asks_to_pause = False
        self._local: dict[wire.SnapshotId, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        self._mirroring: wire.SnapshotId | None = None

    def hear(self, order: wire.Order) -> None:
        self.do(self.machine.receive(self.host.clock(), order))

    def do(self, actions: list[wire.MemberAction]) -> None:
        for action in actions:
            if self.world.log is not None and type(action) is not wire.Send:
                self.world.log(f"{self.world.now:7.3f} {self.name}: {action}")
            _ACTIONS[type(action)](self, action)

    def group(self) -> list[MemberDriver]:
        """Return the members that this one is connected to, by worker."""
        assert self.form is not None
        return [self if name == self.name else self.links[name] for name in self.form.members]

    def close(self) -> list[MemberDriver]:
        """Close all connections; return the peers."""
        peers = [*self.links.values()]
        for peer in peers:
            if peer.links.get(self.name) is self:
                del peer.links[self.name]
        self.links = {}
        self.form = None
        self.is_loaded = self.is_running = self.is_waiting = False
        return peers

    def unreachable(self, name: str) -> None:
        """Notice that a peer does not answer, if that is still so."""
        form = self.form
        if form is None or name not in form.members or name == self.name:
            return
        peer = self.links.get(name)
        is_down = peer is not None and (peer.host.paused_until > self.world.now or self.world.is_cut(self.name, name))
        if self.machine.phase in ("ready", "running", "paused") and (peer is None or is_down):
            self.is_running = False
            self.do(self.machine.broken(self.host.clock(), form.attempt, "connection lost", name))

    # Actions

    def _send(self, action: wire.Send) -> None:
        report = action.report
        for client in self.world.clients:
            if client.is_alive and report.run in ("", client.run):
                if client is self.host:
                    self.world.at(0.0, client, client.hear, report)
                else:
                    self.world.deliver(self.name, client, report)

    def _stop(self, action: wire.Stop) -> None:
        for peer in self.close():
            self.world.at(0.01, peer.host, peer.unreachable, self.name)
        seconds = 0.02 + (4 * self.world.random() if self.host.slow_until > self.world.now else 0)
        self.world.at(seconds, self.host, self._stopped, action.attempt)

    def _stopped(self, attempt: int) -> None:
        if self.is_current():
            self.do(self.machine.stopped(self.host.clock(), attempt))

    def _client(self) -> Client | None:
        return next((each for each in self.world.clients if each.is_alive and each.run == self.machine.run), None)

    def is_current(self) -> bool:
        return self.host.member is self

    def _form(self, form: wire.FormGroup) -> None:
        self.world.joins(self, form)
        self.form, self.asks_to_pause = form, False
        seconds = 0.1 + self.world.random() * 0.4 + (4.0 if self.host.slow_until > self.world.now else 0)
        self.world.at(seconds, self.host, self._load, form)

    def _load(self, form: wire.FormGroup) -> None:
        if self.form is not form:
            return
        world, host = self.world, self.host
        if host.fails_loading:
            host.fails_loading -= 1
            world.last_fault = world.now
            self.do(self.machine.form_failed(host.clock(), form.attempt, "out of memory"))
            return
        first, last = form.cut[form.worker : form.worker + 2]
        local = self._local.get(form.base)
        client = self._client()
        if form.base.attempt == 0:
            part = world.start_of(form.base.step)[first:last]
        elif local is not None and local[:2] == (form.worker, form.cut):
            part = local[2]
        elif client is None or client.paused_until > world.now or world.is_cut(self.name, "client"):
            world.at(0.5, host, self._load, form)
            return
        elif form.base not in client.store and client.machine.attempt > form.attempt:
            return  # a late request; the next order stops this
        else:
            stored = client.store[form.base]
            part = sum((stored[name] for name in form.base_members), ())[first:last]
        self.part, self.step, self.is_loaded = part, form.base.step, True
        self._connect(form, world.now + CONNECT_S)

    def _connect(self, form: wire.FormGroup, until: float) -> None:
        """Connect to all members that are ready for it; dial the others again."""
        if self.form is not form or self.machine.phase != "forming":
            return
        missing = [name for name in form.members if name != self.name and not self._dial(form, name)]
        if not missing:
            return
        if self.world.now > until:
            self.do(self.machine.form_failed(self.host.clock(), form.attempt, "no connection", missing[0]))
        else:
            self.world.at(0.5, self.host, self._connect, form, until)

    def _dial(self, form: wire.FormGroup, name: str) -> bool:
        if name in self.links:
            return True
        peer = next((each for each in self.world.processes(self.machine.run, name) if self._can_reach(each)), None)
        if peer is None:
            return False
        self.links[name], peer.links[self.name] = peer, self
        for each in (self, peer):
            if each.form is not None and len(each.links) == len(each.form.members) - 1:
                self.world.at(0.02, each.host, each._formed, each.form)
        return True

    def _can_reach(self, peer: MemberDriver) -> bool:
        """Return whether both ends of a connection admit each other."""
        here, there = self.form, peer.form
        if here is None or there is None or not peer.is_loaded or peer.host.paused_until > self.world.now:
            return False
        return (
            peer.links.get(self.name, self) is self
            and self.machine.admits(peer.machine.run, there.attempt, peer.name, peer.life)
            and peer.machine.admits(self.machine.run, here.attempt, self.name, self.life)
            and not self.world.is_cut(self.name, peer.name)
        )

    def _formed(self, form: wire.FormGroup) -> None:
        if self.form is form and len(self.links) == len(form.members) - 1:
            self.do(self.machine.formed(self.host.clock(), form.attempt))

    def _run(self, action: wire.RunFrom) -> None:
        form = self.form
        if form is None or form.attempt != action.attempt:
            return
        if len(self.links) < len(form.members) - 1:  # lost between formation and now
            self.do(self.machine.broken(self.host.clock(), form.attempt, "connection lost", self._missing(form)))
            return
        self.world.starts(self, action)
        self.is_running = True
        if action.step == self.host.last_step:
            self.world.at(0.1, self.host, self.host.completes, form.attempt)
        else:
            self._wait()

    def _missing(self, form: wire.FormGroup) -> str:
        return next(name for name in form.members if name != self.name and name not in self.links)

    def _wait(self) -> None:
        """Begin the next step when all members are ready for it; worker 0 sees to that."""
        self.is_waiting = True
        assert self.form is not None
        leader = self if self.form.worker == 0 else self.links.get("client")
        if leader is None or leader.form is None or len(leader.links) < len(leader.form.members) - 1:
            return
        members = leader.group()
        if all(each.is_running and each.is_waiting for each in members):
            asks = any([each.asks_to_pause for each in members])
            for each in members:
                each.is_waiting = False
            self.world.at(self.world.step_s, leader.host, leader._complete, leader.form, members, asks)

    def _complete(self, form: wire.FormGroup, members: list[MemberDriver], asks: bool) -> None:
        world = self.world
        if self.form is not form or any(not each.is_running or not each.is_current() for each in members):
            return
        wakes_at = max(each.host.paused_until for each in members)
        if wakes_at > world.now:
            world.at(wakes_at - world.now, self.host, self._complete, form, members, asks)
            return
        if len(self.links) < len(form.members) - 1:
            return
        if world.cut_until and any(world.is_cut(one.name, other.name) for one in members for other in members):
            world.at(0.5, self.host, self._complete, form, members, asks)
            return
        world.step(members, self.machine.run, form.attempt)
        for each in members:
            world.at(world.random() * 0.02, each.host, each._step_done, each.form, self.step, asks)

    def _step_done(self, form: wire.FormGroup, step: int, paused: bool) -> None:
        if self.form is not form or not self.is_running:
            return
        self.do(self.machine.step_done(self.host.clock(), form.attempt, step, paused=paused))
        if paused or not self.is_running:
            return
        if self.host.last_step is not None and step % 4 == 0:
            self.world.saves(self.host, step)
        if step == self.host.last_step:
            self.world.at(0.1, self.host, self.host.completes, form.attempt)
        else:
            self._wait()

    def _request_pause(self, action: wire.RequestPause) -> None:
        self.asks_to_pause = True

    def _take(self, action: wire.Take) -> None:
        assert self.form is not None
        if self.world.memory_until > self.world.now and self.world.random() < 0.5:
            failed = self.machine.take_failed
            self.world.at(0.0, self.host, lambda: self.do(failed(self.host.clock(), action.snapshot, "no memory")))
            return
        copy = self.form.worker, self.form.cut, self.part
        self.world.at(0.05, self.host, self._taken, action.snapshot, copy)

    def _taken(self, snapshot: wire.SnapshotId, copy: tuple[int, tuple[int, ...], tuple[int, ...]]) -> None:
        if self.is_current():
            self._local[snapshot] = copy
            self.do(self.machine.taken(self.host.clock(), snapshot))

    def _mirror(self, action: wire.Mirror) -> None:
        snapshot = action.snapshot
        if self._mirroring == snapshot or snapshot not in self._local:
            return
        self._mirroring = snapshot
        self.world.at(0.1 + self.world.random(), self.host, self._arrives, snapshot)

    def _arrives(self, snapshot: wire.SnapshotId) -> None:
        world = self.world
        if self._mirroring != snapshot:
            return
        self._mirroring = None
        is_sent = self.name != "client"
        is_lost = is_sent and world.now < world.quiet_s and world.loss > world.random()
        client = self._client()
        if client is None or client.paused_until > world.now or is_lost or world.is_cut(self.name, "client"):
            return
        if snapshot in self._local:
            client.keeps(self.name, snapshot, self._local[snapshot][2])

    def _keep(self, action: wire.Keep) -> None:
        self._local = {each: copy for each, copy in self._local.items() if each >= action.snapshot}

    def _end(self, action: wire.End) -> None:
        self.host.member_ends()


_ACTIONS: dict[type, Any] = {
    wire.Send: MemberDriver._send,
    wire.Stop: MemberDriver._stop,
    wire.FormGroup: MemberDriver._form,
    wire.RunFrom: MemberDriver._run,
    wire.RequestPause: MemberDriver._request_pause,
    wire.Take: MemberDriver._take,
    wire.Pause: lambda *_: None,  # it waits for all before the next step, and then for an order
    wire.Mirror: MemberDriver._mirror,
    wire.Keep: MemberDriver._keep,
    wire.End: MemberDriver._end,
}
