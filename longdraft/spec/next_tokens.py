"""Logits → the tokens drawn from them, for a draft and its target alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.core import Place
from longdraft.spec.adjust import adjust
from longdraft.spec.noise import COUPLED
from longdraft.spec.probs import to_log_probs
from longdraft.spec.sample import draw
from longdraft.spec.verify import DRAW_ROWS


def distribution(logits: torch.Tensor, places: Sequence[Place]) -> tuple[torch.Tensor, dict[int, str]]:
    """What is drawn from: ``logits [R, V]`` → log-probabilities ``[R, V]`` float64, and rows whose request failed."""
    adjusted, errors = adjust(logits, places)
    return to_log_probs(adjusted, [place.seq.params for place in places]), errors


def next_tokens(
    logits: torch.Tensor,  # [R, V]
    places: Sequence[Place],
    *,
    role: int = COUPLED,
    keep: bool = False,
) -> tuple[list[int], torch.Tensor | None]:
    """One token per row, to stand at its place; ``keep`` also returns the log-probabilities ``[R, V]`` drawn from."""
    tokens: list[int] = []
    kept: list[torch.Tensor] = []
    for start in range(0, len(logits), DRAW_ROWS):
        part = slice(start, start + DRAW_ROWS)
        log_probs, _ = distribution(logits[part], places[part])
        seeds = torch.tensor([place.seq.seed for place in places[part]], device=logits.device)
        positions = torch.tensor([place.position for place in places[part]], device=logits.device)
        tokens += draw(log_probs, seeds, positions, role).tolist()
        if keep:
            kept.append(log_probs)
    return tokens, torch.cat(kept) if kept else None
