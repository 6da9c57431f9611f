"""Resuming from the newest checkpoint that is undamaged on all workers, whatever the number of workers.

1  the client reads the manifest of the newest candidate and broadcasts it
2  every worker verifies and reads what it needs of the parts; or the client does, and sends it (``save_local``)
3  all workers report damage; if there is any, all try the next older checkpoint
4  every worker loads its tensors

Tensors are named as in the full model, so every worker finds its own, however the model was cut. The state of a link
(codec state) is loaded by the link between the same two units, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinpipe.comm.membership import is_served
from thinpipe.comm.streams import HashedPieces, fill_tensors, tensor_pieces
from thinpipe.options import OptionError, named
from thinpipe.system.tensors import empty_tensor, spec_bytes, specs_of
from thinpipe.train.checkpoints.folder import all_damaged, candidates, is_complete, load, newest_undamaged
from thinpipe.train.checkpoints.manifest import Manifest, Progress, manifest_of, read_facts
from thinpipe.train.checkpoints.part import DamagedError, read_part
from thinpipe.train.checkpoints.state import Cuts, belongs_here, frozen_hash, load_model_state, load_worker_state
from thinpipe.train.data import difference
from thinpipe.train.engines.auto_bits import set_saved_levels
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.world import World
from thinpipe.train.resolve import fixed_differences
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings, per_machine_settings

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The progress that a run resumes from, and notices for the user."""

    progress: Progress
    notices: list[str]


def adopt_client_settings(settings: Settings, running: RunOptions, world: World) -> tuple[Settings, RunOptions]:
    """Return the client's settings, and whether it resumes, if it alone has the checkpoints. A collective."""
    if not running.save_local or world.workers == 1 or is_served():  # then servers have them already
        return settings, running
    client_settings, resumes = world.gather([settings.to_json(), running.resume is not None])[0]
    if not resumes:
        return settings, replace(running, resume=None)
    # The client does not have this machine's file paths.
    own = {name: value for name in per_machine_settings() if (value := getattr(settings, name)) is not None}
    settings = replace(Settings.from_json(client_settings), **own)
    return settings, running if running.resume else replace(running, resume=running.save)


def resume(
    running: RunOptions,
    settings: Settings,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    data: Mapping[str, Any],
    frozen: str | None = None,
) -> Resumed:
    """Load the newest undamaged checkpoint; raise ValueError on all workers if there is none. A collective.

    ``frozen`` is the hash of the tensors that are not trained.
    """
    assert running.resume is not None
    world = engine.world
    damages: list[tuple[Path, str]] = []
    for path, facts, damage in _candidates(running.resume, world):
        if damage is None:
            manifest = manifest_of(facts, path)
            _check_same_run(manifest, settings, data, path)
            check_frozen(manifest, frozen)
            cuts = Cuts(
                manifest.first_units,
                first_units(engine),
                same_replicas=manifest.settings.replicas == settings.replicas,
            )
            read = _receive_state if running.save_local else _read_state
            state, damage = read(path, manifest, engine, cuts)
        if damage is None:
            load_worker_state(engine, optimizer, state)
            return Resumed(progress=manifest.progress, notices=_notices(damages, path, manifest, settings, cuts))
        damages.append((path, damage))
    raise ValueError(all_damaged(running.resume, damages))


def load_newest(run: Path, engine: Engine) -> None:
    """Load model tensors and link state from the newest checkpoint that is undamaged on the client. A collective.

    Every worker reads what it needs if all see that checkpoint; otherwise the client sends it.
    """
    world, frozen = engine.world, frozen_hash(engine)

    def newest() -> str | None:
        if not world.is_client:
            return None
        path, manifest, _ = newest_undamaged(run)
        check_frozen(manifest, frozen)
        return path.name

    name = world.gather(world.together(newest))[0]
    path = run if is_complete(run) else run / name
    facts = world.gather(_facts_here(path))
    manifest = manifest_of(facts[0], path)
    cuts = Cuts(manifest.first_units, first_units(engine))
    kinds = ("model/", "reference/", "link/")

    def read() -> State:
        if all(each == facts[0] for each in facts):
            state = load(path, lambda key: key.startswith(kinds) and belongs_here(engine, cuts.moved(key)))
            return {cuts.moved(key): value for key, value in state.items()}
        state, damage = _receive_state(path, manifest, engine, cuts, kinds)
        if damage is not None:
            raise ValueError(damage)
        return state

    state = world.together(read)
    world.together(lambda: load_model_state(engine, state))
    remembered = {key: value for key, value in state.items() if key.startswith("link/")}
    if remembered:
        engine.load_codec_state(remembered)
    set_saved_levels(engine, manifest.progress.levels)


def _facts_here(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint as this worker sees it; None if it does not."""
    try:
        return read_facts(path)
    except ValueError:
        return None


def _candidates(where: Path, world: World) -> Iterator[tuple[Path, dict[str, Any], str | None]]:
    """Yield the checkpoints to try, newest first, as the client sees them: path, manifest, damage of the manifest."""
    names: list[str] = []
    problem = None
    if world.is_client:
        try:
            found = candidates(where)
            names = [""] if found == [where] else [path.name for path in found]
        except ValueError as error:
            problem = str(error)
    names, problem = world.gather([names, problem])[0]
    if problem is not None:
        raise ValueError(problem)
    for name in names:
        path, facts, damage = where / name, {}, None
        if world.is_client:
            try:
                facts = read_facts(path)
            except DamagedError as error:
                damage = str(error)
            except ValueError as error:
                problem = str(error)
        facts, damage, problem = world.gather([facts, damage, problem])[0]
        if problem is not None:
            raise ValueError(problem)
        yield path, facts, damage


def _check_same_run(manifest: Manifest, settings: Settings, data: Mapping[str, Any], path: Path) -> None:
    differing = fixed_differences(manifest.settings, settings)
    if differing:
        raise OptionError(f"{path} is of another run: {{{differing[0]}}} was another")
    other = difference(manifest.data, data)
    if other is not None:
        raise OptionError(
            f"a run goes on with the data it began with, and these are others: {other}. Put them back as they were, "
            "or start a new run without {resume}"
        )


def check_frozen(manifest: Manifest, here: str | None) -> None:
    """Raise OptionError unless the tensors that are not trained have the hash that was saved."""
    if manifest.data.get("frozen") not in (None, here):
        raise OptionError(
            "a run goes on with the weights it began with, and those that are frozen, which a checkpoint does not "
            "have, are others now: name the {model} it began with"
        )


def _read_state(path: Path, manifest: Manifest, engine: Engine, cuts: Cuts) -> tuple[State, str | None]:
    """Return the tensors that this worker needs, and the first damage found on any worker."""
    world, damage = engine.world, None
    state: State = {}
    if not path.is_dir():
        damage = named("does not see it; name a folder that all machines share, or give {save_local}")
    else:
        try:
            for part in manifest.parts:
                found = read_part(path, part, lambda name: belongs_here(engine, cuts.moved(name)))
                state |= {cuts.moved(name): tensor for name, tensor in found.items()}
        except DamagedError as error:
            damage = str(error)
    return state, _first_damage(world.gather(damage))


def _first_damage(damages: list[str | None]) -> str | None:
    """Return the first worker's damage, with its number unless it is the client; None if there is none."""
    for worker, damage in enumerate(damages):
        if damage is not None:
            return f"{damage} (worker {worker})" if worker else damage
    return None


def _receive_state(
    path: Path, manifest: Manifest, engine: Engine, cuts: Cuts, kinds: tuple[str, ...] = ("",)
) -> tuple[State, str | None]:
    """Like ``_read_state`` if the client has all parts: it verifies them, and sends every worker its tensors.

    ``kinds``: prefixes of the tensors to read.
    """
    world, state = engine.world, State()
    for part in manifest.parts:  # one at a time: all of them need not fit in the client's memory
        tensors, damage = State(), None
        if world.is_client:
            try:
                tensors = read_part(path, part, lambda name: name.startswith(kinds))
            except DamagedError as error:
                damage = str(error)
        specs, damage = world.gather([specs_of(tensors), damage])[0]
        if damage is not None:
            return {}, damage
        mine = [name for name in specs if belongs_here(engine, cuts.moved(name))]
        state |= exchange_tensors(world, tensors, specs, mine)
    return {cuts.moved(name): tensor for name, tensor in state.items()}, None


def exchange_tensors(world: World, everything: State, specs: Mapping[str, Any], mine: list[str]) -> State:
    """Return the tensors named in ``mine``; the client sends each other worker its own. A collective.

    ``everything``: all tensors, on the client. ``specs``: their shapes and dtypes, on every worker.
    """
    servers = range(1, world.workers)
    requested = world.gather(mine)
    if world.is_client:
        tensors = [[everything[name] for name in names] for names in requested]
        hashes = [world.control.send_pieces(tensor_pieces(tensors[worker]), worker) for worker in servers]
        state = {name: everything[name] for name in mine}
    else:
        state = {name: empty_tensor(specs[name]) for name in mine}
        pieces = HashedPieces(world.control.receive_pieces(sum(spec_bytes(specs[name]) for name in mine), 0))
        for _ in fill_tensors(state.values(), pieces):
            pass
        hashes = [pieces.hexdigest()]
    sent, *received = world.gather(hashes)
    changed = [worker for worker in servers if received[worker - 1] != [sent[worker - 1]]]
    if changed:
        raise ValueError(f"the tensors of worker {changed[0]} were changed on their way from the client; try again")
    return state


def first_units(engine: Engine) -> tuple[int, ...]:
    return tuple(sorted({holding.first_unit for holding in engine.holdings}))


def _notices(
    damages: list[tuple[Path, str]], path: Path, manifest: Manifest, settings: Settings, cuts: Cuts
) -> list[str]:
    lines = [
        f"step {int(damaged.name.rpartition('-')[2])} is damaged: {damage}; going on from step {manifest.progress.step}"
        for damaged, damage in damages
    ]
    versions = manifest.versions()
    if versions is not None:
        lines.append(f"{path} was {versions}")
    before, now = manifest.settings.workers, settings.workers
    lost = sorted(cuts.dropped)
    if before > now:
        lost.append("the random state of " + ("worker" if before == now + 1 else "workers"))
        lost[-1] += " " + ", ".join(map(str, range(now, before)))
    if before != now or cuts.saved != cuts.here:
        moved = "the model is cut elsewhere" if before == now else f"saved with {before} workers, goes on with {now}"
        lines.append(f"{moved}: results will not be bit-identical; dropped: {', '.join(lost) or 'nothing'}")
    return lines
