"""Logits of a step → what each row gets: the verdict on its proposal, by the rule it asked for.

Rows are worked on a few at a time, since several float64 copies of ``[rows, V]`` are alive while tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from longdraft.core import Place, Row
from longdraft.outputs import Logprob
from longdraft.spec.logprobs import token_logprobs
from longdraft.spec.next_tokens import distribution
from longdraft.spec.verify import DRAW_ROWS, Verdict, verify_coupled, verify_maximal


@dataclass(frozen=True)
class Decision:
    """What one row gets of a step: its new tokens, how many of them were proposed, and why no further one can be drawn.

    ``error`` concerns the token after the last of ``tokens``: the model's logits, or what the request does to them.
    """

    tokens: list[int]
    accepted: int
    error: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # one per token, if asked for
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of the prompt's next tokens, likewise


NOT_FINITE = "the model's logits are not finite"
Rule = Callable[[torch.Tensor, list[Row], dict[int, torch.Tensor]], Verdict]


def decide(rows: list[Row], logits: torch.Tensor, log_q: dict[int, torch.Tensor]) -> list[Decision]:
    """One decision per row. ``logits [R, V]``: ``num_scored + num_logits`` each, in order; ``log_q`` by sequence id."""
    decisions: dict[int, Decision] = {}
    own = logits.split([row.num_scored + row.num_logits for row in rows])
    drawn = {i: part[rows[i].num_scored :] for i, part in enumerate(own) if rows[i].num_logits}
    for part in _slices(rows):
        for rule in (_coupled, _maximal, _maximal_one_hot):
            chosen = [i for i in part if _rule(rows[i], log_q) is rule]
            if chosen:
                decided = _decide([rows[i] for i in chosen], [drawn[i] for i in chosen], rule, log_q)
                decisions.update(zip(chosen, decided, strict=True))
    out = [decisions.get(i, Decision([], 0)) for i in range(len(rows))]
    return [_with_prompt_logprobs(*three) for three in zip(rows, out, own, strict=True)]


def _rule(row: Row, log_q: dict[int, torch.Tensor]) -> Rule:
    """Without a proposal both rules draw from the target's distribution, and the coupled draw is the plain one."""
    if not row.proposal or row.seq.draft is None or row.seq.draft.sampling_rule == "coupled":
        return _coupled
    return _maximal if row.seq.id in log_q else _maximal_one_hot


def _coupled(log_p: torch.Tensor, rows: list[Row], log_q: dict[int, torch.Tensor]) -> Verdict:
    return verify_coupled(log_p, *_proposals(log_p, rows))


def _maximal(log_p: torch.Tensor, rows: list[Row], log_q: dict[int, torch.Tensor]) -> Verdict:
    proposals, seeds, positions = _proposals(log_p, rows)
    return verify_maximal(log_p, proposals, torch.cat([log_q[row.seq.id] for row in rows]), seeds, positions)


def _maximal_one_hot(log_p: torch.Tensor, rows: list[Row], log_q: dict[int, torch.Tensor]) -> Verdict:
    """Proposals of a deterministic draft."""
    proposals, seeds, positions = _proposals(log_p, rows)
    return verify_maximal(log_p, proposals, None, seeds, positions)


def _proposals(log_p: torch.Tensor, rows: list[Row]) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Proposals, seeds, and the position of the first new token, per row."""
    seeds = torch.tensor([row.seq.seed for row in rows], device=log_p.device)
    positions = torch.tensor([len(row.seq.ids) for row in rows], device=log_p.device)
    return [list(row.proposal) for row in rows], seeds, positions


def _slices(rows: list[Row]) -> Iterator[list[int]]:
    """Row numbers, some ``DRAW_ROWS`` logit rows at a time; rows that want none are left out."""
    part: list[int] = []
    size = 0
    for i, row in enumerate(rows):
        if row.num_logits == 0:
            continue
        part.append(i)
        size += row.num_logits
        if size >= DRAW_ROWS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _decide(rows: list[Row], own: list[torch.Tensor], rule: Rule, log_q: dict[int, torch.Tensor]) -> list[Decision]:
    logits = torch.cat(own)
    bad = ~logits.amax(dim=-1).isfinite()
    places = [Place(row.seq, row.proposal[:n]) for row in rows for n in range(row.num_logits)]
    log_p, errors = distribution(logits.masked_fill(bad[:, None], 0.0), places)
    errors |= dict.fromkeys(bad.nonzero().flatten().tolist(), NOT_FINITE)
    decisions = _cut_at_errors(rows, rule(log_p, rows, log_q), errors)
    return [_with_logprobs(*three) for three in zip(rows, decisions, own, strict=True)]


def _with_logprobs(row: Row, decision: Decision, logits: torch.Tensor) -> Decision:
    """``logits [num_logits, V]`` are the row's own."""
    top = row.seq.params.logprobs
    if top is None:
        return decision
    return replace(decision, logprobs=token_logprobs(logits[: len(decision.tokens)], decision.tokens, top))


def _with_prompt_logprobs(row: Row, decision: Decision, logits: torch.Tensor) -> Decision:
    """``logits [num_scored + …, V]`` are the row's own; the first are after the tokens it feeds first."""
    top, seq = row.seq.params.prompt_logprobs, row.seq
    if not row.num_scored or top is None:
        return decision
    next_ids = seq.ids[seq.num_committed + 1 :][: row.num_scored]
    scored = token_logprobs(logits[: row.num_scored], next_ids, top)
    return replace(decision, prompt_logprobs=scored)


def _cut_at_errors(rows: list[Row], verdict: Verdict, errors: dict[int, str]) -> list[Decision]:
    """An error counts where plain decoding would have met it: not behind the first rejected token."""
    decisions, start = [], 0
    for row, tokens, accepted in zip(rows, verdict.tokens, verdict.accepted, strict=True):
        good = next((n for n in range(len(tokens)) if start + n in errors), len(tokens))
        error = errors[start + good] if good < len(tokens) else None
        decisions.append(Decision(tokens[:good], min(accepted, good), error))
        start += row.num_logits
    return decisions
