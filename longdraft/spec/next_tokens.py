"""Logits → the tokens drawn from them, for a draft and its target alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.core import Place
from longdraft.kernels import native
from longdraft.spec.adjust import NOT_FINITE, adjust
from longdraft.spec.noise import COUPLED
from longdraft.spec.probs import to_log_probs
from longdraft.spec.sample import draw
from longdraft.spec.verify import DRAW_ROWS


def distribution(logits: torch.Tensor, places: Sequence[Place]) -> tuple[torch.Tensor, dict[int, str]]:
    """What is drawn from: ``logits [R, V]`` → log-probabilities ``[R, V]`` float64, and rows whose request failed."""
    adjusted, errors = adjust(logits, places)
    bad = ~adjusted.amax(dim=-1).isfinite()
    errors |= dict.fromkeys(bad.nonzero().flatten().tolist(), NOT_FINITE)
    return to_log_probs(adjusted.masked_fill(bad[:, None], 0.0), [place.seq.params for place in places]), errors


def draws(logits: torch.Tensor, places: Sequence[Place], role: int = COUPLED) -> tuple[list[int], dict[int, str]]:
    """The token drawn at each place from ``logits [R, V]``, and for rows where that failed the reason."""
    tokens, errors = [0] * len(places), {}
    able = native.can_draw(logits)
    direct = [i for i, place in enumerate(places) if able and not place.seq.params.filters]
    if direct:
        part, own = _rows(logits, direct), [places[i] for i in direct]
        part, failed = adjust(part, own)
        settings = ([getattr(p, name) for p in own] for name in ("temperature", "seed", "position"))
        for n, token in enumerate(native.draw(part, *settings, role)):
            tokens[direct[n]] = max(token, 0)
            if token < 0 or n in failed:
                errors[direct[n]] = failed.get(n, NOT_FINITE)
    others = sorted(set(range(len(places))) - set(direct))
    for start in range(0, len(others), DRAW_ROWS):
        chosen = others[start : start + DRAW_ROWS]
        own = [places[i] for i in chosen]
        log_probs, failed = distribution(logits[chosen], own)
        for i, token in zip(chosen, draw(log_probs, *_keys(own, logits.device), role).tolist(), strict=True):
            tokens[i] = token
        errors |= {chosen[n]: reason for n, reason in failed.items()}
    return tokens, errors


def next_tokens(
    logits: torch.Tensor,  # [R, V]
    places: Sequence[Place],
    *,
    role: int = COUPLED,
    keep: bool = False,
) -> tuple[list[int], torch.Tensor | None]:
    """One token per row, to stand at its place; ``keep`` also returns the log-probabilities ``[R, V]`` drawn from."""
    if not keep:
        return draws(logits, places, role)[0], None
    tokens: list[int] = []
    kept: list[torch.Tensor] = []
    for start in range(0, len(logits), DRAW_ROWS):
        part = slice(start, start + DRAW_ROWS)
        kept.append(distribution(logits[part], places[part])[0])
        tokens += draw(kept[-1], *_keys(places[part], logits.device), role).tolist()
    return tokens, torch.cat(kept)


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _keys(places: Sequence[Place], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions, on which noise depends."""
    seeds, positions = ([getattr(place, name) for place in places] for name in ("seed", "position"))
    return torch.tensor(seeds, device=device), torch.tensor(positions, device=device)
