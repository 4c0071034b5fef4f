"""How drafted tokens are drawn and judged: ``longdraft.spec.verify`` on what the processors of a call leave."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
        return verify_coupled(_log_probs(scores), proposals, self._of(rows), positions)

    def _of(self, rows: Sequence[int]) -> torch.Tensor:
        return self.seeds[list(rows)]


class Maximal(Coupled):
    """Acceptance with min(1, p/q), else a draw from what is left of p (arXiv:2211.17192, arXiv:2302.01318)."""

    def begin(self) -> None:
        """See ``Greedy``."""
        self._log_q: list[torch.Tensor] = []

    def propose(self, scores: torch.Tensor, rows: Sequence[int], positions: torch.Tensor) -> list[int]:
        """See ``Greedy``."""
        self._log_q.append(_log_probs(scores))
        return draft_draw(self._log_q[-1], self._of(rows), positions).tolist()

    def verify(
        self, scores: torch.Tensor, proposals: Sequence[Sequence[int]], rows: Sequence[int], positions: torch.Tensor
    ) -> Verdict:
        """See ``Greedy``. All rows have proposals, or none."""
        if not any(proposals):
            return super().verify(scores, proposals, rows, positions)
        log_q = torch.stack(self._log_q, dim=1).flatten(0, 1)
        return verify_maximal(_log_probs(scores), proposals, log_q, self._of(rows), positions)


def _log_probs(scores: torch.Tensor) -> torch.Tensor:
    return scores.double().log_softmax(dim=-1)
