"""Which drafted tokens stand, and what is emitted: two rules, pure functions on ragged rows.

Coupled (arXiv:2408.07978, the default): the target draws with its usual noise at every position; drafted tokens stand
while they equal these draws, and what is emitted is always the target's own draw, so a draft cannot change an output.
Maximal (arXiv:2211.17192, arXiv:2302.01318): a drafted token x stands with probability min(1, p(x) / q(x)), the first
rejected one is replaced by a draw from norm((p − q)+). The law is the target's, but the tokens depend on the draft.

Row b of B proposes g_b ≥ 0 tokens and owns g_b + 1 consecutive rows of ``log_p``; the i-th of these is the target's
distribution of the token after i drafted ones:

    log_p      | row 0: 0 1 .. g_0 | row 1: 0 1 .. g_1 | ...     [R, V], R = sum(g_b + 1)
    log_q      | row 0: 0 1 ..     | row 1: 0 1 ..     | ...     [sum(g_b), V]

A row's outcome depends on its own data, seed and position only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import torch

from longdraft.spec.noise import DRAFT, RESIDUAL, accept_uniforms
from longdraft.spec.sample import draw

# Rows drawn at once: bounds the float64 temporaries of a draw, each [DRAW_ROWS, V].
DRAW_ROWS = 16


@dataclass(frozen=True)
class Verdict:
    """Per row: how many drafted tokens stand, and what is emitted: these and exactly one more."""

    accepted: list[int]
    tokens: list[list[int]]


def verify_coupled(
    log_p: torch.Tensor, proposal_tokens: Sequence[Sequence[int]], seeds: torch.Tensor, positions: torch.Tensor
) -> Verdict:
    """``verify_draws`` of the target's draws from its distributions.

    ``log_p [R, V]``; ``seeds, positions [B]`` int64. ``positions[b]`` is the index of row b's first new token.
    """
    counts = [len(tokens) + 1 for tokens in proposal_tokens]
    row, step = _ragged(counts, log_p.device)
    places = zip(
        log_p.split(DRAW_ROWS), seeds[row].split(DRAW_ROWS), (positions[row] + step).split(DRAW_ROWS), strict=True
    )
    drawn = iter([token for place in places for token in draw(*place).tolist()])
    return verify_draws([list(islice(drawn, count)) for count in counts], proposal_tokens)


def verify_draws(own: Sequence[Sequence[int]], proposal_tokens: Sequence[Sequence[int]]) -> Verdict:
    """Emit the target's own draws up to the first that differs from the proposal, or one past its end.

    ``own[b]``: one draw after each of row b's drafted tokens, and one before them.
    """
    accepted = [
        _leading(x == y for x, y in zip(tokens, mine, strict=False))
        for tokens, mine in zip(proposal_tokens, own, strict=True)
    ]
    return Verdict(accepted, [list(mine[: n + 1]) for mine, n in zip(own, accepted, strict=True)])


def verify_maximal(
    log_p: torch.Tensor,
    proposal_tokens: Sequence[Sequence[int]],
    log_q: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> Verdict:
    """Accept with min(1, p/q), replace the first rejected token from the residual, or add one from p at the end.

    ``log_p [R, V]``; ``log_q [sum g_b, V]``: the very distributions the tokens were drawn from by ``draft_draw``, or
    None for a deterministic draft, which is one-hot; ``seeds, positions [B]`` int64 as in ``verify_coupled``.
    """
    lengths = [len(tokens) for tokens in proposal_tokens]
    drafted = torch.tensor([x for tokens in proposal_tokens for x in tokens], dtype=torch.int64, device=log_p.device)
    row, step = _ragged(lengths, log_p.device)
    index = torch.arange(len(drafted), device=log_p.device)
    p = log_p[index + row, drafted].double().exp()  # every earlier row has one logit row more than drafted tokens
    q = torch.ones_like(p) if log_q is None else log_q[index, drafted].double().exp()
    passed = iter((accept_uniforms(seeds[row], positions[row] + step) < acceptance_probability(p, q)).tolist())
    accepted = [_leading(list(islice(passed, length))) for length in lengths]

    taken, end = torch.tensor([accepted, lengths], dtype=torch.int64, device=log_p.device)
    refused = end.cumsum(0) - end + taken  # the first drafted token that falls, where taken < end
    last: list[int] = []
    for rows in torch.arange(len(lengths), device=log_p.device).split(DRAW_ROWS):
        p = log_p[refused[rows] + rows].double().exp()
        q = torch.zeros_like(p)  # past the proposal's end nothing was drafted, and the residual is p itself
        fell = (taken < end)[rows]
        at = refused[rows][fell]
        q[fell] = _one_hot(drafted[at], q) if log_q is None else log_q[at].double().exp()
        last += draw(residual(p, q).log(), seeds[rows], (positions + taken)[rows], RESIDUAL).tolist()
    tokens = [[*drafts[:n], token] for drafts, n, token in zip(proposal_tokens, accepted, last, strict=True)]
    return Verdict(accepted, tokens)


def draft_draw(log_q: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What a draft under the maximal rule proposes: ``log_q [R, V]``, ``seeds, positions [R]`` → ``[R]``."""
    return draw(log_q, seeds, positions, DRAFT)


def acceptance_probability(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """min(1, p/q) of the target's and the draft's probability of a token, elementwise.

    0 where q is 0 or NaN: such a token was not drawn from q, so nothing can be said for it.
    """
    return torch.where(q > 0, (p / q).clamp(max=1), 0.0)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """norm((p − q)+), ``[..., V]``: what a rejected token is replaced from.

    p itself where nothing is left, which takes p = q up to rounding (then a rejection is a rounding error too), or
    where q is NaN (then no drafted token stands, whatever it was).
    """
    excess = (p - q).clamp(min=0)
    mass = excess.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)


def _one_hot(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, like.shape[-1]).to(like)


def _ragged(counts: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each item of ragged rows laid end to end: its row, and its place there."""
    count = torch.tensor(counts, dtype=torch.int64, device=device)
    row = torch.arange(len(counts), device=device).repeat_interleave(count)
    return row, torch.arange(len(row), device=device) - (count.cumsum(0) - count)[row]


def _leading(flags: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(takewhile(bool, flags))
