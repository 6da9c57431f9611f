"""The memory of a worker's process over the attempts of a run: frozen weights, data and snapshots.

A snapshot has the changing state of one worker after a step: what a checkpoint has, under the same names, as copies in
the memory of the host. The client keeps those of all workers, and restores the others from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinpipe.system.sizes import size_text
from thinpipe.system.tensors import specs_of
from thinpipe.train.checkpoints.folder import FolderLock
from thinpipe.train.checkpoints.manifest import Progress
from thinpipe.train.checkpoints.resume import Resumed, exchange_tensors, first_units
from thinpipe.train.checkpoints.state import (
    Cuts,
    belongs_here,
    load_worker_state,
    model_tensors,
    trained_tensors,
    worker_state,
)
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.world import World
from thinpipe.train.events import Epoch, Listener, Step
from thinpipe.train.models.weights import LoadWeights, set_parameter

State = dict[str, Tensor]
SnapshotKey = tuple[int, int]  # attempt and step


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of one worker after a step."""

    state: State
    first_units: tuple[int, ...]  # where the model was cut
    progress: Progress | None = None  # on the client


class Pilot(Protocol):
    """An object that decides when a worker runs, takes snapshots and pauses."""

    def formed(self, world: World, expected_bytes: list[int]) -> None:
        """Report that this attempt can run, and wait until all workers can; raise if it is stopped.

        ``expected_bytes``: of the state of each worker.
        """

    def step_done(self, step: int, take: Callable[[], Snapshot], *, paused: bool) -> None:
        """Report a completed step. ``take`` returns a snapshot of it; ``paused``: no step follows in this attempt."""

    def wants_pause(self) -> bool:
        """Return True if this worker asks all to pause after the present step."""

    def leave(self, number: int) -> None:
        """Report that a signal asks this server to leave the run."""


@dataclass
class Keeper:
    """The memory of one process over all attempts of a run."""

    pilot: Pilot
    base: SnapshotKey | None = None  # the snapshot that the present attempt begins with; None: the start of the run
    own: dict[SnapshotKey, Snapshot] = field(default_factory=dict)
    others: dict[SnapshotKey, dict[str, State]] = field(default_factory=dict)  # on the client, by the server's name
    frozen: State = field(default_factory=dict)  # by names in the full model
    loaded: Any = None  # the client's data with its facts
    listener: Listener | None = None
    expected_bytes: list[int] = field(default_factory=list)  # of the state of each worker
    lock: FolderLock | None = None  # of the folder of checkpoints, on the client

    def take(self, engine: Engine, optimizer: torch.optim.Optimizer, progress: Progress) -> Snapshot:
        """Return a snapshot of this worker."""
        state = {name: value.detach().to("cpu", copy=True) for name, value in worker_state(engine, optimizer).items()}
        kept = Progress(**asdict(progress)) if engine.world.is_client else None
        return Snapshot(state=state, first_units=first_units(engine), progress=kept)

    def forget_before(self, snapshot: SnapshotKey) -> None:
        """Delete all snapshots that are older."""
        for store in (self.own, self.others):
            for key in [each for each in store if each < snapshot]:
                store.pop(key, None)

    def begin(
        self, engine: Engine, loaded: Any, make_listener: Callable[[], Listener], expected_bytes: list[int]
    ) -> Callable[[], Listener]:
        """Keep what the next attempt needs; return a function that returns the listener of all attempts."""
        self.expected_bytes = expected_bytes
        trained = trained_tensors(engine)
        self.frozen = {name: each for name, each in model_tensors(engine).items() if name not in trained}
        if engine.world.is_client:
            self.loaded = loaded
        return lambda: self._the_listener(make_listener)

    def _the_listener(self, make_listener: Callable[[], Listener]) -> Listener:
        self.listener = self.listener or ReplayedListener(make_listener())
        return self.listener

    def notice(self, every: int | None) -> str:
        """Return a line for the user about the traffic of snapshots."""
        own, *others = self.expected_bytes
        sizes = ", ".join(map(size_text, others))
        return (
            f"every {every} steps the servers send copies of their state here, {sizes}, while links are idle; "
            f"this client keeps up to {size_text(2 * (own + sum(others)))} of copies in memory"
        )

    def ready(self, world: World) -> None:
        self.pilot.formed(world, self.expected_bytes)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def loader(self, load: LoadWeights | None) -> LoadWeights | None:
        """Return a function that takes the kept weights, and loads the others by ``load``."""
        if load is None or not self.frozen:
            return load
        return lambda model, names: self._load(load, model, names)

    def _load(self, load: LoadWeights, model: nn.Module, names: Iterable[str]) -> None:
        """Load parameters by name: those that are kept from memory, the others by ``load``."""
        wanted, named = list(names), model.state_dict(keep_vars=True)
        kept = {id(named[name]): self.frozen[name] for name in wanted if name in self.frozen}
        placed: dict[int, nn.Parameter | None] = {}
        for name, tensor in named.items():
            if id(tensor) in kept:
                path, _, last = name.rpartition(".")
                module = model.get_submodule(path)
                if id(tensor) in placed:  # a tied weight
                    module._parameters[last] = placed[id(tensor)]
                else:
                    set_parameter(module, last, kept[id(tensor)])
                    placed[id(tensor)] = module._parameters[last]
        load(model, [name for name in wanted if id(named[name]) not in kept])

    def restore(self, engine: Engine, optimizer: torch.optim.Optimizer) -> Resumed:
        """Load the snapshot of all workers that this attempt begins with; return its progress. A collective."""
        assert self.base is not None
        world, own = engine.world, self.own.get(self.base)
        everything: State = {} if own is None else dict(own.state)
        facts: Any = None
        if world.is_client:
            assert own is not None
            for state in self.others[self.base].values():
                everything |= state
            facts = [specs_of(everything), list(own.first_units), asdict(own.progress or Progress())]
        specs, saved, progress = world.gather(facts)[0]
        cuts = Cuts(tuple(saved), first_units(engine))
        mine = [name for name in specs if belongs_here(engine, cuts.moved(name))]
        state = {name: everything[name] for name in mine if name in everything}
        state |= exchange_tensors(world, everything, specs, [name for name in mine if name not in state])
        load_worker_state(engine, optimizer, {cuts.moved(name): value for name, value in state.items()})
        best = progress.pop("best")
        return Resumed(progress=Progress(**progress, best=None if best is None else tuple(best)), notices=[])


class ReplayedListener(Listener):
    """A listener that receives no event of a step twice, though steps are computed again after a loss."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._stepped, self._evaluated = listener, 0, 0
        self._is_planned = False
        self.noticed, self.saved = listener.noticed, listener.saved  # type: ignore[method-assign]
        self.bits_chosen = listener.bits_chosen  # type: ignore[method-assign]
        self.save_failed, self.finished, self.failed = (  # type: ignore[method-assign]
            listener.save_failed,
            listener.finished,
            listener.failed,
        )

    def planned(self, plan: Any) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._listener.planned(plan)

    def stepped(self, step: Step) -> None:
        if step.step > self._stepped:
            self._stepped = step.step
            self._listener.stepped(step)

    def evaluated(self, epoch: Epoch) -> None:
        if epoch.step > self._evaluated:
            self._evaluated = epoch.step
            self._listener.evaluated(epoch)
