"""Log-probabilities as they are returned: the target's own, before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.outputs import Logprob


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[dict[int, Logprob]]:
    """For each token, itself and the ``top`` most probable ones: ``logits [n, V]`` → one dict of id → ``Logprob`` each.

    The chosen token comes first; ranks count from 1, equal values by lower id.
    """
    rows = []
    for logit_row, token in zip(logits, tokens, strict=True):  # row by row: a long prompt has very many
        row = logit_row.double().log_softmax(dim=-1)
        own = row[token]
        rank = 1 + int((row > own).sum()) + int((row[:token] == own).sum())
        entry = {token: Logprob(float(own), rank)}
        for i, other in enumerate(_best(row, top), start=1):
            entry.setdefault(other, Logprob(float(row[other]), i))
        rows.append(entry)
    return rows


def _best(row: torch.Tensor, n: int) -> list[int]:
    """Ids of the ``n`` largest of ``row [V]``, in order; of equals the lower id first, which ``topk`` leaves open."""
    n = min(n, len(row))
    if n == 0:
        return []
    ids = (row >= row.topk(n).values[-1]).nonzero().flatten()
    return ids[row[ids].argsort(descending=True, stable=True)][:n].tolist()
