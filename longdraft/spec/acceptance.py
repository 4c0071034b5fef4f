"""How many drafted tokens stand under the two rules (arXiv:2408.07978 and arXiv:2211.17192).

p is the target's distribution, q the draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch


def overlap(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Acceptance of the maximal rule (arXiv:2211.17192): sum min(p, q) = 1 − TV. ``[..., V]`` twice → ``[...]``."""
    return torch.minimum(p, q).sum(dim=-1)


def coupled_overlap(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Acceptance of the coupled rule (arXiv:2408.07978): P(argmax(log p + G) = argmax(log q + G)).

    ``[..., V]`` twice → ``[...]``. It is the sum over i with p_i, q_i > 0 of 1 / sum_j max(p_j / p_i, q_j / q_i). In
    order of p_j / q_j the first entry wins the maximum from i on and the second before i, so running sums of sorted
    p and q serve every i: O(V log V), and no term is a difference.
    """
    order = (p.log() - q.log()).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).argsort(dim=-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    p_from = p.flip(-1).cumsum(dim=-1).flip(-1)
    q_before = q.cumsum(dim=-1).roll(1, dims=-1)
    q_before[..., 0] = 0
    shared = (p > 0) & (q > 0)
    return torch.where(shared, 1 / (p_from / p + q_before / q), 0.0).sum(dim=-1)


def expected_tokens(alpha: float | Sequence[float], gamma: int) -> float:
    """Mean tokens per verify, 1 + a_1 + a_1 a_2 + ..., of ``gamma`` drafted ones.

    ``alpha``: the chance that a token stands when those before it do; one for all positions, or one per position.
    """
    rates = list(alpha)[:gamma] if isinstance(alpha, Sequence) else [alpha] * gamma
    assert len(rates) == gamma, f"{gamma} drafted tokens need as many acceptance rates, not {len(rates)}"
    return 1.0 + sum(accumulate(rates, mul))
