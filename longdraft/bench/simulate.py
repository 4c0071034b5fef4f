"""What a draft of a given acceptance would bring: the real draft's cost, the known continuation's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from longdraft.bench import PLAIN, Plan
from longdraft.bench.turns import OnProgress, Rows, end, fork
from longdraft.capture import Seen
from longdraft.config import DraftConfig
from longdraft.core import Proposal
from longdraft.core import Sequence as EngineSequence
from longdraft.drafts.base import Draft, DraftRow
from longdraft.engine.runner import Runner
from longdraft.llm import LLM

Prompt = tuple[int, ...]


class AssumedAcceptance(Draft):
    """Runs a real draft for its cost, then proposes the known continuation, each token of it spoiled at random."""

    def __init__(self, real: Draft, plan: Plan, vocab_size: int, known: Mapping[Prompt, list[int]]) -> None:
        """``known``: prompt → its ids as plain decoding goes on."""
        self.needs = real.needs
        self.real, self.rate, self.vocab_size, self.known = real, plan.assume_acceptance, vocab_size, known
        self._ids: dict[int, list[int]] = {}  # by sequence
        self._random = np.random.default_rng(plan.seed)

    def propose(self, rows: Sequence[DraftRow], *, sampled: bool) -> Proposal:
        """See ``Draft``."""
        self.real.propose(rows, sampled=False)
        return Proposal([self._tokens(row) for row in rows])

    def _tokens(self, row: DraftRow) -> list[int]:
        length = len(row.seq.ids)
        right = self._known(row.seq)[length : length + row.gamma]
        held = self._random.random(len(right)) < self.rate
        return [t if h else (t + 1) % self.vocab_size for t, h in zip(right, held, strict=True)]

    def _known(self, seq: EngineSequence) -> list[int]:
        if seq.id not in self._ids:
            self._ids[seq.id] = self.known[tuple(seq.ids[: seq.num_prompt])]
        return self._ids[seq.id]

    def observe(self, seq: EngineSequence, seen: Seen) -> None:
        """See ``Draft``."""
        self.real.observe(seq, seen)

    def follow(self, seqs: Sequence[EngineSequence]) -> None:
        """See ``Draft``."""
        self.real.follow(seqs)

    def settle(self, seqs: Sequence[EngineSequence]) -> None:
        """See ``Draft``."""
        self.real.settle(seqs)

    def fork(self, source: EngineSequence, child: EngineSequence) -> None:
        """See ``Draft``."""
        self.real.fork(source, child)


def continuations(llm: LLM, sources: Rows, report: OnProgress) -> dict[Prompt, list[int]]:
    """Prompt → its ids after plain decoding to the end of its forks' lives; untimed."""
    rows = fork(llm, sources, PLAIN)
    total_tokens = sum(seq.max_total - seq.num_prompt for seq in rows)
    try:
        for seq in rows:
            llm.engine.hold(seq.id, False)
        while llm.engine.has_work:
            llm.engine.step()
            report("continue", sum(len(seq.output_ids) for seq in rows), total_tokens, "tokens")
    finally:
        end(llm, rows)
    return {tuple(seq.ids[: seq.num_prompt]): seq.ids for seq in rows}


@contextmanager
def assumed(runner: Runner, plan: Plan, vocab_size: int, known: Mapping[Prompt, list[int]]) -> Iterator[None]:
    """While it lasts, every draft of ``runner`` proposes what ``AssumedAcceptance`` says."""
    real, made = runner.draft, {}

    def draft(config: DraftConfig) -> Draft:
        inner = real(config)
        if inner not in made:
            made[inner] = AssumedAcceptance(inner, plan, vocab_size, known)
        return made[inner]

    runner.draft = draft
    try:
        yield
    finally:
        del runner.draft  # the class's method is visible again
