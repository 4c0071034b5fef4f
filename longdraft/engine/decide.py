"""Logits of a step → what each row gets: the verdict on its proposal, by the rule it asked for.

Rows are worked on a few at a time, since several float64 copies of ``[rows, V]`` are alive while tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from longdraft.core import Row
from longdraft.outputs import Logprob
from longdraft.spec.logprobs import token_logprobs
from longdraft.spec.probs import to_log_probs
from longdraft.spec.verify import DRAW_ROWS, Verdict, verify_coupled, verify_maximal


@dataclass(frozen=True)
class Decision:
    """What one row gets of a step: its new tokens, how many of them were proposed, and whether its logits gave out.

    ``broken``: the logits after the last of ``tokens`` were not finite, so no further token can be drawn.
    """

    tokens: list[int]
    accepted: int
    broken: bool = False
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # one per token, if asked for


Rule = Callable[[torch.Tensor, list[Row], dict[int, torch.Tensor]], Verdict]


def decide(rows: list[Row], logits: torch.Tensor, log_q: dict[int, torch.Tensor]) -> list[Decision]:
    """One decision per row. ``logits [R, V]``: ``num_logits`` rows each, in order; ``log_q`` by sequence id."""
    decisions: dict[int, Decision] = {}
    for part, own in _slices(rows, logits):
        for rule in (_coupled, _maximal, _maximal_one_hot):
            chosen = [i for i in part if _rule(rows[i], log_q) is rule]
            if chosen:
                decided = _decide([rows[i] for i in chosen], [own[i] for i in chosen], rule, log_q)
                decisions.update(zip(chosen, decided, strict=True))
    return [decisions.get(i, Decision([], 0)) for i in range(len(rows))]


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


def _slices(rows: list[Row], logits: torch.Tensor) -> Iterator[tuple[list[int], dict[int, torch.Tensor]]]:
    """Row numbers and their logits, some ``DRAW_ROWS`` logit rows at a time; rows that want none are left out."""
    part: list[int] = []
    own: dict[int, torch.Tensor] = {}
    start = size = 0
    for i, row in enumerate(rows):
        if row.num_logits == 0:
            continue
        own[i] = logits[start : start + row.num_logits]
        start += row.num_logits
        part.append(i)
        size += row.num_logits
        if size >= DRAW_ROWS:
            yield part, own
            part, own, size = [], {}, 0
    if part:
        yield part, own


def _decide(rows: list[Row], own: list[torch.Tensor], rule: Rule, log_q: dict[int, torch.Tensor]) -> list[Decision]:
    logits = torch.cat(own)
    bad = ~logits.amax(dim=-1).isfinite()
    params = [row.seq.params for row in rows for _ in range(row.num_logits)]
    log_p = to_log_probs(logits.masked_fill(bad[:, None], 0.0), params)
    verdict = rule(log_p, rows, log_q)
    decisions = _cut_at_bad_logits(rows, verdict, bad.tolist())
    return [_with_logprobs(*pair) for pair in zip(rows, decisions, own, strict=True)]


def _with_logprobs(row: Row, decision: Decision, logits: torch.Tensor) -> Decision:
    """``logits [num_logits, V]`` are the row's own."""
    top = row.seq.params.logprobs
    if top is None:
        return decision
    return replace(decision, logprobs=token_logprobs(logits[: len(decision.tokens)], decision.tokens, top))


def _cut_at_bad_logits(rows: list[Row], verdict: Verdict, bad: list[bool]) -> list[Decision]:
    """Bad logits count where plain decoding would have met them: not behind the first rejected token."""
    decisions, start = [], 0
    for row, tokens, accepted in zip(rows, verdict.tokens, verdict.accepted, strict=True):
        reached = bad[start : start + len(tokens)]
        start += row.num_logits
        good = reached.index(True) if True in reached else len(tokens)
        decisions.append(Decision(tokens[:good], min(accepted, good), broken=good < len(tokens)))
    return decisions
