"""Logits and sampling parameters → the distribution a token is drawn from, as log-probabilities.

Greedy is a one-hot distribution, not a special case. Nothing here knows whether the logits are a draft's or the
target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from longdraft.sampling_params import SamplingParams

FIRST_LOOK = 256  # tokens that are sorted at first


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
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=logits.device)
    # Shifted before the division: a tiny temperature must not turn the largest logit into inf − inf.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    whole = [i for i, p in enumerate(params) if not p.filters]
    out = torch.full_like(logits, -torch.inf)
    out[whole] = logits[whole].log_softmax(dim=-1)
    for i, p in enumerate(params):
        if p.filters:
            ids, values = _kept(logits[i], p)
            out[i, ids] = values.log_softmax(dim=-1)
    return out


def _kept(row: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that the filters leave of ``row [V]`` (its largest entry is 0), in descending order: ids and logits.

    A few hundred tokens nearly always hold what is kept, so that only these are sorted; else there are more.
    """
    lowest = math.log(params.min_p) if params.min_p > 0 else -math.inf
    whole = len(row)
    size = min(whole, max(FIRST_LOOK, params.top_k))
    while True:
        border = max(lowest, float(row.topk(size).values[-1])) if size < whole else lowest
        ids = (row >= border).nonzero().flatten()  # all that equal the last one, too
        order = row[ids].argsort(descending=True, stable=True)  # of equals the lower id comes first
        ids, values = ids[order], row[ids[order]]
        complete = size == whole or border == lowest
        if params.top_k > 0:
            ids, values, complete = ids[: params.top_k], values[: params.top_k], True
        if params.top_p == 1:
            if complete:
                return ids, values
        else:
            total = values.logsumexp(dim=0) if complete else _left_by(row, lowest).logsumexp(dim=0)
            mass = (values - total).exp()
            before = mass.cumsum(dim=0) - mass  # a token stays while what precedes it falls short of top_p
            short = int((before < params.top_p).sum())
            if complete or short < len(ids):
                return ids[: max(1, short)], values[: max(1, short)]
        size = min(whole, 16 * size)


def _left_by(row: torch.Tensor, lowest: float) -> torch.Tensor:
    return row[row >= lowest] if lowest > -math.inf else row
