"""Logits of a step → what each row gets: the verdict on its proposal, by the rule it asked for.

Rows are worked on a few at a time, since several float64 copies of ``[rows, V]`` are alive while tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from longdraft.core import Place, Row
from longdraft.outputs import Logprob
from longdraft.spec.logprobs import token_logprobs
from longdraft.spec.next_tokens import distribution, draws
from longdraft.spec.verify import DRAW_ROWS, Verdict, verify_draws, verify_maximal


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


Rule = Callable[[torch.Tensor, list[Row], dict[int, torch.Tensor]], Verdict]


def decide(rows: list[Row], logits: torch.Tensor, log_q: dict[int, torch.Tensor]) -> list[Decision]:
    """One decision per row. ``logits [R, V]``: ``num_scored + num_logits`` each, in order; ``log_q`` by sequence id."""
    own = logits.split([row.num_scored + row.num_logits for row in rows])
    drawn = [part[row.num_scored :] for row, part in zip(rows, own, strict=True)]
    wanted = [i for i, row in enumerate(rows) if row.num_logits]
    coupled = [i for i in wanted if _rule(rows[i], log_q) is None]
    out = [Decision([], 0) for _ in rows]
    if coupled:
        whole = sum(rows[i].num_logits for i in coupled) == len(logits)
        chosen = [rows[i] for i in coupled]
        decided = _coupled(chosen, logits if whole else torch.cat([drawn[i] for i in coupled]))
        _fill(out, coupled, chosen, decided, drawn)
    for part in _slices(rows, sorted(set(wanted) - set(coupled))):
        for rule in (_maximal, _maximal_one_hot):
            members = [i for i in part if _rule(rows[i], log_q) is rule]
            if members:
                chosen = [rows[i] for i in members]
                decided = _by_law(chosen, torch.cat([drawn[i] for i in members]), rule, log_q)
                _fill(out, members, chosen, decided, drawn)
    return [_with_prompt_logprobs(*three) for three in zip(rows, out, own, strict=True)]


def _fill(
    out: list[Decision], at: list[int], rows: list[Row], decisions: list[Decision], logits: list[torch.Tensor]
) -> None:
    for i, row, decision in zip(at, rows, decisions, strict=True):
        out[i] = _with_logprobs(row, decision, logits[i])


def _rule(row: Row, log_q: dict[int, torch.Tensor]) -> Rule | None:
    """How the row's proposal is judged; ``None`` for the coupled rule.

    Without a proposal both rules draw from the target's distribution, and the coupled draw is the plain one.
    """
    draft = row.choice.draft
    if not row.proposal or draft is None or draft.sampling_rule == "coupled":
        return None
    return _maximal if row.seq.id in log_q else _maximal_one_hot


def _coupled(rows: list[Row], logits: torch.Tensor) -> list[Decision]:
    """``logits [sum of num_logits, V]``: the target draws at every place, and proposals stand while they agree."""
    tokens, errors = draws(logits, _places(rows))
    drawn = iter(tokens)
    own = [list(islice(drawn, row.num_logits)) for row in rows]
    return _cut_at_errors(rows, verify_draws(own, [row.proposal for row in rows]), errors)


def _by_law(rows: list[Row], logits: torch.Tensor, rule: Rule, log_q: dict[int, torch.Tensor]) -> list[Decision]:
    """The same under the maximal rule, which compares distributions."""
    log_p, errors = distribution(logits, _places(rows))
    return _cut_at_errors(rows, rule(log_p, rows, log_q), errors)


def _places(rows: list[Row]) -> list[Place]:
    return [Place(row.seq, row.proposal[:n]) for row in rows for n in range(row.num_logits)]


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


def _slices(rows: list[Row], wanted: list[int]) -> Iterator[list[int]]:
    """The numbers ``wanted``, some ``DRAW_ROWS`` logit rows at a time."""
    part: list[int] = []
    size = 0
    for i in wanted:
        part.append(i)
        size += rows[i].num_logits
        if size >= DRAW_ROWS:
            yield part
            part, size = [], 0
    if part:
        yield part


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
