"""How drafted tokens are drawn and judged: ``longdraft.spec.verify`` on what the processors of a call leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from longdraft.errors import InvalidValueError
from longdraft.spec.sample import draw
from longdraft.spec.verify import Verdict, draft_draw, verify_coupled, verify_draws, verify_maximal


class Greedy:
    """The highest score, as ``generate`` takes it."""

    def begin(self) -> None:
        """A round's first draft step comes next."""

    def propose(self, scores: torch.Tensor, rows: Sequence[int], positions: torch.Tensor) -> list[int]:
        """A token for each of ``rows``: ``scores [R, V]``, ``positions [R]`` of the new tokens."""
        return scores.argmax(dim=-1).tolist()

    def verify(
        self, scores: torch.Tensor, proposals: Sequence[Sequence[int]], rows: Sequence[int], positions: torch.Tensor
    ) -> Verdict:
        """What stands: ``scores [R, V]`` lie as in ``longdraft.spec.verify``, ``positions`` of each first new token."""
        best = scores.argmax(dim=-1).split([len(tokens) + 1 for tokens in proposals])
        return verify_draws([x.tolist() for x in best], proposals)


class Coupled(Greedy):
    """Draft and target draw with the same noise, and what is returned is the target's draw (arXiv:2408.07978)."""

    def __init__(self, seeds: torch.Tensor) -> None:
        """``seeds [B]`` int64, one per row."""
        self.seeds = seeds

    def propose(self, scores: torch.Tensor, rows: Sequence[int], positions: torch.Tensor) -> list[int]:
        """See ``Greedy``."""
        return draw(_log_probs(scores), self._of(rows), positions).tolist()

    def verify(
        self, scores: torch.Tensor, proposals: Sequence[Sequence[int]], rows: Sequence[int], positions: torch.Tensor
    ) -> Verdict:
        """See ``Greedy``."""
        return verify_coupled(_checked(_log_probs(scores)), proposals, self._of(rows), positions)

    def _of(self, rows: Sequence[int]) -> torch.Tensor:
        return self.seeds[list(rows)]


class Maximal(Coupled):
    """Acceptance with min(1, p/q), else a draw from what is left of p (arXiv:2211.17192, arXiv:2302.01318)."""

    def begin(self) -> None:
        """See ``Greedy``."""
        self._log_q: dict[int, list[torch.Tensor]] = defaultdict(list)

    def propose(self, scores: torch.Tensor, rows: Sequence[int], positions: torch.Tensor) -> list[int]:
        """See ``Greedy``."""
        log_q = _log_probs(scores)
        for row, own in zip(rows, log_q, strict=True):
            self._log_q[row].append(own)
        return draft_draw(log_q, self._of(rows), positions).tolist()

    def verify(
        self, scores: torch.Tensor, proposals: Sequence[Sequence[int]], rows: Sequence[int], positions: torch.Tensor
    ) -> Verdict:
        """See ``Greedy``."""
        if not any(proposals):
            return super().verify(scores, proposals, rows, positions)
        log_q = torch.stack([q for row in rows for q in self._log_q[row]])
        return verify_maximal(_checked(_log_probs(scores)), proposals, log_q, self._of(rows), positions)


def _log_probs(scores: torch.Tensor) -> torch.Tensor:
    return scores.double().log_softmax(dim=-1)


def _checked(log_p: torch.Tensor) -> torch.Tensor:
    """What the target draws from; ``generate`` refuses what is no distribution, too."""
    if bool(log_p.isnan().any()):
        limit = "must leave every token's probability a number, and one of them above zero"
        raise InvalidValueError("the scores of a token", "NaN", limit, "Look at the logits, and at your processors.")
    return log_p
