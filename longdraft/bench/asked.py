"""A draft asked before every token of plain decoding: it proposes after the true history, and nothing is verified.

The engine steps as ever, with the draft's own hooks, so that a draft with a state gets the calls that it always gets.
Only its proposals are withheld, whence each step adds plain decoding's one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from longdraft.bench.turns import Rows, advance
from longdraft.config import DraftConfig
from longdraft.core import Proposal
from longdraft.drafts.base import Draft, DraftRow
from longdraft.llm import LLM
from longdraft.spec.acceptance import coupled_overlap, overlap
from longdraft.spec.verify import verify_draws

Place = tuple[int, int]  # which prompt, and which of the positions asked about
Ask = Callable[[list[Place], list[DraftRow], Callable[[], Proposal]], None]  # the last one makes the proposal


@contextmanager
def withheld(draft: Draft, ask: Callable[[Sequence[DraftRow], Callable[[], Proposal]], None]) -> Iterator[None]:
    """While it lasts ``draft`` proposes nothing; ``ask(rows, propose)`` may let it make its proposal and look at it."""
    right = draft.propose

    def propose(rows: Sequence[DraftRow], *, sampled: bool) -> Proposal:
        ask(rows, lambda: right(rows, sampled=sampled))
        return Proposal([[] for _ in rows])

    draft.propose = propose
    try:
        yield
    finally:
        del draft.propose  # the class's method is visible again


def walk(llm: LLM, rows: Rows, config: DraftConfig, starts: Sequence[int], positions: int, ask: Ask) -> None:
    """Decode ``rows``, whose draft is ``config``, plainly up to ``starts[i] + positions`` ids; ask before every token.

    The token with index ``starts[i]`` is a row's position 0; those before it have negative ones.
    """
    number = {seq.id: i for i, seq in enumerate(rows)}

    def look(asked: Sequence[DraftRow], propose: Callable[[], Proposal]) -> None:
        prompts = [number[row.seq.id] for row in asked]
        places = [(i, len(row.seq.ids) - starts[i]) for i, row in zip(prompts, asked, strict=True)]
        ask(places, list(asked), propose)

    with withheld(llm.engine.runner.draft(config), look):
        advance(llm, rows, [start + positions for start in starts])


def accepted(proposal: Sequence[int], truth: Sequence[int]) -> int:
    """How many of the proposed tokens stand, where plain decoding goes on with ``truth``."""
    return verify_draws([truth], [proposal]).accepted[0]


def overlaps(log_p: torch.Tensor, proposal: Sequence[int], log_q: torch.Tensor | None) -> tuple[float, float]:
    """Expected acceptance of one proposed token under the maximal and the coupled rule: ``log_p``, ``log_q [V]``.

    Without ``log_q`` the token is certain, and both are its probability; without a token both are 0.
    """
    p = log_p.double().exp()
    if not proposal:
        return 0.0, 0.0
    if log_q is None:
        return (float(p[proposal[0]]),) * 2
    q = log_q.double().exp()
    return float(overlap(p, q)), float(coupled_overlap(p, q))
