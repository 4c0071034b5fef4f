"""Which of its cached tokens a row's draft reads, by the selections of ``longdraft.kv.select``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from longdraft.capture import Seen
from longdraft.core import SequenceStats
from longdraft.drafts.refresh import Since, spare
from longdraft.kv.select.base import Selector, TokenSelector
from longdraft.kv.select.full import Full
from longdraft.kv.select.keys import Keys
from longdraft.kv.select.streaming_llm import StreamingLLM, first_and_last


def readable(kind: type[Selector]) -> bool:
    """Whether a selection can be read over a stock cache: all can that do not read pages in place."""
    return issubclass(kind, (Full, StreamingLLM, TokenSelector))


@dataclass
class _Choice:
    """What is known of a row, and what was chosen for it when it had ``start`` cached tokens."""

    seen: Seen | None = None
    tokens: torch.Tensor | None = None  # [L, G, count]
    start: int = 0
    since: Since = field(default_factory=Since)


class Reading:
    """The choices of all rows. A choice is a number of a row's cached tokens, of which padding is none."""

    def __init__(self, selector: Selector, gamma: int, stats: list[SequenceStats]) -> None:
        self.selector, self.gamma, self.stats = selector, gamma, stats
        self._rows = [_Choice() for _ in stats]

    @property
    def queries(self) -> int:
        """Of how many of the last tokens queries are wanted."""
        return self.selector.needs.queries if isinstance(self.selector, TokenSelector) else 0

    def observe(self, row: int, seen: Seen) -> None:
        """The queries of final tokens."""
        state = self._rows[row]
        state.seen = state.seen.then(seen, self.queries) if state.seen else seen.last(self.queries)

    def tokens(self, row: int, length: int, keys: Keys) -> torch.Tensor:
        """``[L or 1, G or 1, count]`` of a row's first ``length`` tokens, ascending, for a round that begins.

        The round's own tokens, which it reads besides, are part of the budget.
        """
        if isinstance(self.selector, Full):
            return torch.arange(length)[None, None]
        if isinstance(self.selector, StreamingLLM):
            count = min(length, max(0, self.selector.budget - self.gamma))
            return first_and_last(length, count, self.selector.sinks)[None, None]
        state = self._rows[row]
        if self._outdated(row, length):
            self._choose(row, length, keys)
        later = torch.arange(state.start, length)
        return torch.cat([state.tokens, later.expand(*state.tokens.shape[:2], -1)], dim=2)

    def _outdated(self, row: int, length: int) -> bool:
        state, budget = self._rows[row], self.selector.budget
        due = state.since.due(self.selector.refresh, self.stats[row])
        if state.tokens is None or due:
            return True
        return state.tokens.shape[2] + length - state.start + self.gamma > max(budget, self.gamma)

    def _choose(self, row: int, length: int, keys: Keys) -> None:
        state, budget = self._rows[row], self.selector.budget
        tail = self.gamma + spare(self.selector.refresh, budget, self.gamma)
        count = min(length, max(0, budget - tail))
        if 0 < count < length:
            state.tokens = self.selector.choose(state.seen, keys, count).cpu()
        else:
            layers, _, heads, _ = state.seen.queries.shape
            state.tokens = first_and_last(length, count).expand(layers, keys(0).shape[1], -1)
        state.start, state.since = length, Since.now(self.stats[row])
