"""Logits → the tokens drawn from them, for a draft and its target alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.sampling_params import SamplingParams
from longdraft.spec.noise import COUPLED
from longdraft.spec.probs import to_log_probs
from longdraft.spec.sample import draw
from longdraft.spec.verify import DRAW_ROWS


def next_tokens(
    logits: torch.Tensor,  # [R, V]
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    *,
    role: int = COUPLED,
    keep: bool = False,
) -> tuple[list[int], torch.Tensor | None]:
    """One token per row, to stand at ``positions[r]`` of its sequence; ``keep`` also returns log-probs ``[R, V]``."""
    tokens: list[int] = []
    kept: list[torch.Tensor] = []
    for start in range(0, len(logits), DRAW_ROWS):
        part = slice(start, start + DRAW_ROWS)
        log_probs = to_log_probs(logits[part], params[part])
        seeds_t, positions_t = (torch.tensor(x[part], device=logits.device) for x in (seeds, positions))
        tokens += draw(log_probs, seeds_t, positions_t, role).tolist()
        if keep:
            kept.append(log_probs)
    return tokens, torch.cat(kept) if kept else None
