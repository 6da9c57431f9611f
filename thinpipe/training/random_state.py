"""Torch's random state of one worker, as tensors that a checkpoint can keep."""

from __future__ import annotations

import torch
from torch import Tensor

from thinpipe.training.batches import mixed_seed


def seed_worker(seed: int, worker: int) -> None:
    """What dropout draws differs on every worker; the model was built before, from the same seed everywhere."""
    torch.manual_seed(mixed_seed(seed, -1, worker))


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """What is not in it, of a worker or a device that was not there when it was saved, stays as it is."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
