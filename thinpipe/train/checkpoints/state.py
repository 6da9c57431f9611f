"""The state of a worker as named tensors: model, optimizer, codecs and random number generators.

    model/<name>                  a parameter that is trained, or a buffer, by its name in the full model
    optimizer/<name>/<what>       the optimizer's state of a parameter
    link/..., replica/...         the state of the codecs of this worker's links, or of its replica
    random/<worker>/cpu, cuda     torch's generators
    reference/log_probs           of all pairs, for direct preference optimization; on the client

Names are unique over all workers, so that one checkpoint holds them all.
"""

from __future__ import annotations

from hashlib import sha256

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from thinpipe.train.batches import mixed_seed
from thinpipe.train.engines.engine import Engine
from thinpipe.train.engines.preference import PreferenceLoss
from thinpipe.train.optimize import load_state_for, optimizer_bytes, state_for
from thinpipe.train.settings import Settings

_REFERENCE = "reference/log_probs"


class Cuts:
    """The cuts of a model when it was saved and here, as the first unit of every stage."""

    def __init__(self, saved: tuple[int, ...], here: tuple[int, ...], *, same_replicas: bool = True) -> None:
        self.saved, self.here, self.same_replicas = saved, here, same_replicas
        self.dropped: set[str] = set()  # descriptions of saved state that has no place here

    def moved(self, key: str) -> str:
        """Return the name here of a saved tensor; a link is identified by the two units that it joins.

        Return an empty string for state of a link that does not exist here, or of another number of replicas.
        """
        kind, _, rest = key.partition("/")
        if kind == "replica" and not self.same_replicas:
            self.dropped.add("what replicas had not sent yet")
            return ""
        if kind != "link" or self.saved == self.here:
            return key
        stage, _, what = rest.partition("/")
        # A stage sends activations to the next one, and gradients to the one before.
        behind = int(not what.startswith("backward/"))
        unit = self.saved[int(stage) + behind]
        if unit in self.here:
            return f"link/{self.here.index(unit) - behind}/{what}"
        if not what.endswith("/steps"):  # every link has a step counter
            self.dropped.add(f"what codecs remembered of the link before unit {unit}")
        return ""


def worker_state(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what this worker saves. Of replicas, worker 0 alone saves model and optimizer."""
    state = dict(engine.codec_state())
    for kind, value in random_state(engine.world.device).items():
        state[f"random/{engine.world.worker}/{kind}"] = value
    if isinstance(engine.loss, PreferenceLoss) and engine.world.is_client:
        state[_REFERENCE] = engine.loss.reference
    if engine.owns_state:
        state |= {f"model/{name}": tensor.detach() for name, tensor in trained_tensors(engine).items()}
        for name, parameter in _parameters(engine).items():
            for what, value in state_for(optimizer, parameter).items():
                if isinstance(value, Tensor):
                    state[f"optimizer/{name}/{what}"] = value
    return state


def belongs_here(engine: Engine, key: str) -> bool:
    """Return True if this worker loads the checkpoint's tensor of this name."""
    kind, _, rest = key.partition("/")
    if kind == "model":
        return rest in trained_tensors(engine)
    if kind == "optimizer":
        return rest.rpartition("/")[0] in _parameters(engine)
    owner, _, what = rest.partition("/")
    if kind in ("random", "replica"):
        return int(owner) == engine.world.worker
    if key == _REFERENCE:
        return engine.world.is_client
    if kind != "link":
        return False
    # Copies of samples are the same at both ends of a link: the sender saves them, the receiver loads them too.
    is_receiver = what.startswith("sent/") and int(owner) + 1 in engine.stages
    return int(owner) in engine.stages or is_receiver


def load_model_state(engine: Engine, state: dict[str, Tensor]) -> None:
    """Load parameters and buffers, and the reference of a loss of preference."""
    if isinstance(engine.loss, PreferenceLoss) and engine.world.is_client:
        engine.loss.reference = state[_REFERENCE]
    tensors = trained_tensors(engine)
    for name, tensor in tensors.items():
        saved = state.get(f"model/{name}")
        if saved is None or saved.shape != tensor.shape:
            found = "it does not have" if saved is None else f"{list(saved.shape)} instead of {list(tensor.shape)} has"
            raise ValueError(f"the checkpoint was saved from another model: {found} {name}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(state[f"model/{name}"])


def load_worker_state(engine: Engine, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    load_model_state(engine, state)
    parameters = _parameters(engine)
    for key, value in state.items():
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            name, _, what = rest.rpartition("/")
            load_state_for(optimizer, parameters[name], what, value)
    engine.load_codec_state({key: value for key, value in state.items() if key.startswith(("link/", "replica/"))})
    mine = f"random/{engine.world.worker}/"
    set_random_state(
        {key.removeprefix(mine): value for key, value in state.items() if key.startswith(mine)}, engine.world.device
    )


def state_bytes(engine: Engine, settings: Settings) -> int:
    """Return an estimate of the bytes that this worker saves in a checkpoint."""
    mine = engine.loss.reference.nbytes if isinstance(engine.loss, PreferenceLoss) else 0
    if engine.owns_state:
        mine += sum(tensor.numel() * tensor.element_size() for tensor in trained_tensors(engine).values())
        for stage in engine.stages.values():
            trained = (each for each in stage.parameters().values() if each.requires_grad)
            mine += optimizer_bytes(trained, settings.optimizer)
    if settings.parallel == "data" and settings.compress_backward != "none" and settings.error_feedback:
        # Error feedback: the compression error of each gradient.
        mine += sum(each.numel() * each.element_size() for each in engine.parameters() if each.requires_grad)
    return mine + sum(value.numel() * value.element_size() for value in engine.codec_state().values())


def digest(engine: Engine) -> str:
    """Return one SHA-256 of all parameters and buffers of the full model, over all workers. A collective."""
    held = model_tensors(engine) if engine.owns_state else {}
    mine = {name: sha256(_bytes(tensor).numpy().tobytes()).hexdigest() for name, tensor in held.items()}
    everyone = {name: sha for known in engine.world.gather(mine) for name, sha in known.items()}
    return sha256("".join(f"{name} {everyone[name]}\n" for name in sorted(everyone)).encode()).hexdigest()


def frozen_hash(engine: Engine) -> str | None:
    """Return the hash of all tensors that are not trained, so not in checkpoints; None without any. A collective."""
    frozen = model_tensors(engine).keys() - trained_tensors(engine).keys()
    mine = {
        name: xxh3_128(_bytes(tensor).numpy().data).hexdigest()
        for name, tensor in model_tensors(engine).items()
        if name in frozen and tensor.numel()
    }
    everyone = {name: each for known in engine.world.gather(mine) for name, each in known.items()}
    lines = "".join(f"{name} {everyone[name]}\n" for name in sorted(everyone))
    return xxh3_128(lines.encode()).hexdigest() if everyone else None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def trained_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return those of ``model_tensors`` that a run changes. The others are available from their source."""
    held = model_tensors(engine)
    return {name: each for name, each in held.items() if each.requires_grad or not isinstance(each, nn.Parameter)}


def model_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return parameters and buffers of this worker's stages by their names in the full model."""
    return {name: tensor for stage in engine.stages.values() for name, tensor in stage.tensors().items()}


def _parameters(engine: Engine) -> dict[str, nn.Parameter]:
    return {name: parameter for stage in engine.stages.values() for name, parameter in stage.parameters().items()}


def seed_worker(seed: int, worker: int) -> None:
    """Seed torch so that dropout differs on every worker; call it after the model is built from the common seed."""
    torch.manual_seed(mixed_seed(seed, -1, worker))


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore torch's generators; those of a worker or device that did not exist at saving stay as they are."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
