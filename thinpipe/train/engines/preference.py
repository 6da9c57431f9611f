"""Direct preference optimization (Rafailov et al. 2023): the loss of pairs of texts against a reference model.

    loss = -log sigmoid(beta * ((log p(chosen) - log p(rejected)) - (log r(chosen) - log r(rejected))))

p is the model in training and r the reference, the same model before its first step. Adapters are zero then, so the
reference is the model without them. Its log-probabilities are computed once and kept here, and in checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from thinpipe.train.engines.loss import Loss
from thinpipe.train.tasks.task import IGNORED

BETA = 0.1  # as in TRL and in the paper's experiments


class PreferenceLoss(Loss):
    """The loss of packed pairs; labels are [N, T + 2]: tokens, the place where the rejected text begins, the pair."""

    def __init__(self, *args: Any, beta: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._beta = beta
        self.reference = torch.zeros(0, 2)  # log-probabilities of the chosen and the rejected text of each pair

    def begin(self, labels: Tensor, chunks: int, labelled: int | None = None, replicas: int = 1) -> None:
        super().begin(labels, chunks, len(labels), replicas)

    def targets(self, labels: Tensor) -> Tensor:
        """Return 0 for every pair: its first text is the chosen one."""
        return labels.new_zeros(len(labels))

    def __call__(self, outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
        margins = self._margins(outputs, labels)
        self._right.append((margins > 0).sum())
        return -functional.logsigmoid(self._beta * margins).sum() * self._share

    def score(self, outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> tuple[float, Tensor]:
        """Return the summed loss, and which text of each pair the model prefers to the reference's choice."""
        labels = labels.to(self._device)
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        filled = torch.cat([labels, labels[:1].expand(len(first) - len(labels), -1)])  # evaluations have full batches
        with torch.no_grad():
            margins = self._margins(outputs, filled)[: len(labels)]
        return float(-functional.logsigmoid(self._beta * margins.double()).sum()), (margins <= 0).long().cpu()

    def keep(self, outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> None:
        """Keep the log-probabilities of these pairs as those of the reference."""
        with torch.no_grad():
            found = self._log_probs(outputs, labels.to(self._device)).cpu()
        pairs = labels[:, -1].cpu()
        missing = int(pairs.max()) + 1 - len(self.reference)
        if missing > 0:
            self.reference = torch.cat([self.reference, torch.zeros(missing, 2)])
        self.reference[pairs] = found

    def _margins(self, outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
        reference = self.reference[labels[:, -1].cpu()].to(labels.device)
        gains = self._log_probs(outputs, labels) - reference
        return gains[:, 0] - gains[:, 1]

    def _log_probs(self, outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """Return the log-probabilities of both texts of each pair, [N, 2]."""
        tokens, begins = labels[:, :-2], labels[:, -2:-1]
        pieces = list(self._pieces(tokens))
        if len(pieces) == 1 or not torch.is_grad_enabled():
            return torch.stack([self._of_pairs(outputs, tokens, begins, places) for places in pieces]).sum(0)
        return torch.stack(
            [checkpoint(self._of_pairs, outputs, tokens, begins, places, use_reentrant=False) for places in pieces]
        ).sum(0)

    def _of_pairs(self, outputs: Any, tokens: Tensor, begins: Tensor, places: slice) -> Tensor:
        logits, here = self._logits(outputs, places), tokens[:, places]
        losses = functional.cross_entropy(
            logits.float().flatten(0, 1), here.flatten(), ignore_index=IGNORED, reduction="none"
        ).view(here.shape)
        is_chosen = torch.arange(places.start, places.stop, device=here.device) < begins
        return -torch.stack([losses.where(is_chosen, 0).sum(1), losses.where(~is_chosen, 0).sum(1)], dim=1)
