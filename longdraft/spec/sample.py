"""The draw: argmax(log p + G), the one way a token is ever chosen (arXiv:2408.07978)."""

from __future__ import annotations

import torch

from longdraft.spec.noise import COUPLED, all_gumbels, gumbels

# Below this share of tokens in the support, noise is drawn for these alone.
SPARSE_SUPPORT = 0.2


def draw(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, role: int = COUPLED) -> torch.Tensor:
    """One token per row: ``log_probs [R, V]``, ``seeds, positions [R]`` int64 → ``[R]``.

    ``positions[r]`` is the index the new token will have in its sequence. Ties go to the lowest id. A one-hot row
    gives its only token whatever the noise. ``role`` names the stream of noise.
    """
    support = log_probs > -torch.inf
    counts = support.sum(dim=-1)
    if (counts <= 1).all():  # greedy rows: no noise is needed
        return support.byte().argmax(dim=-1)
    if counts.sum() > SPARSE_SUPPORT * support.numel():
        return (log_probs + all_gumbels(seeds, positions, log_probs.shape[-1], role)).argmax(dim=-1)
    row, token = support.nonzero(as_tuple=True)
    scores = torch.full_like(log_probs, -torch.inf)
    scores[row, token] = log_probs[row, token] + gumbels(seeds[row], positions[row], token, role)
    return scores.argmax(dim=-1)
