"""Logits and sampling parameters → the distribution a token is drawn from, as log-probabilities.

Greedy is a one-hot distribution, not a special case. Nothing here knows whether the logits are a draft's or the
target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.sampling_params import SamplingParams


def to_log_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """``logits [R, V]``, one ``SamplingParams`` per row → ``[R, V]`` float64, −inf outside the support.

    Order of the filters: temperature, min_p, top_k, top_p, each on what the one before it left. Ties at a border of
    top_k and top_p keep the lower ids.
    """
    out = torch.full(logits.shape, -torch.inf, dtype=torch.float64, device=logits.device)
    greedy = torch.tensor([p.greedy for p in params], device=logits.device)
    best = logits.argmax(dim=-1)  # the first of equals: ties go to the lowest id
    out[greedy, best[greedy]] = 0.0
    rows = [i for i, p in enumerate(params) if not p.greedy]
    if rows:
        out[rows] = _filtered(logits[rows].double(), [params[i] for i in rows])
    return out


def _filtered(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    # Shifted before the division: a tiny temperature must not turn the largest logit into inf − inf.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / column([p.temperature for p in params])
    if any(p.min_p > 0 for p in params):
        floor = column([p.min_p for p in params]).log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        vocab = logits.shape[-1]
        top_k = column([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params])
        logits = _cut_sorted(logits, top_k, column([p.top_p for p in params]))
    return logits.log_softmax(dim=-1)


def _cut_sorted(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep each row's ``top_k`` largest, then the fewest of these that hold a mass of ``top_p``."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    mass = ordered.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass  # a token stays while what precedes it falls short of top_p
    drop = (before >= top_p) & (rank > 0)
    # top_p = 1 keeps all: rounding must not push the running sum to 1 early.
    ordered = ordered.masked_fill(drop & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, ids, ordered)
