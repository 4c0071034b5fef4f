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
    for row, token in zip(logits.double().log_softmax(dim=-1), tokens, strict=True):
        own = row[token]
        rank = 1 + int((row > own).sum()) + int((row[:token] == own).sum())
        entry = {token: Logprob(float(own), rank)}
        values, ids = row.sort(descending=True, stable=True) if top else (row[:0], row[:0])
        for i, (value, other) in enumerate(zip(values[:top].tolist(), ids[:top].tolist(), strict=True), start=1):
            entry.setdefault(other, Logprob(value, i))
        rows.append(entry)
    return rows
