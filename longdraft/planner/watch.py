"""What a draft that costs next to nothing would have got accepted: it is asked without its proposal being used.

Its guess is compared with the text as that comes, by whatever way of decoding, and so counts as a round of its own. The
next guess is made where that round would have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from longdraft.core import Round
from longdraft.planner.estimate import Try

GUESS = 4  # tokens: a longer one would tell more of late positions, but later


class Watch:
    """Of one draft, over all sequences."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, tuple[int, ...]]] = {}  # sequence id → the guess and where it starts

    def due(self, seq_id: int) -> bool:
        """Whether a guess is wanted: the last one is decided."""
        return seq_id not in self._open

    def observe(self, rounds: Sequence[Round]) -> list[Try]:
        """After a step, with the guesses that were made in it: what is decided now."""
        return [found for r in rounds if (found := self._observe(r)) is not None]

    def release(self, seq_id: int) -> None:
        """Forget a sequence, or a guess that its draft has overtaken by proposing itself."""
        self._open.pop(seq_id, None)

    def _observe(self, r: Round) -> Try | None:
        ids, seq_id = r.row.seq.ids, r.row.seq.id
        if r.row.guess is not None:
            self._open[seq_id] = len(ids) - r.tokens, r.row.guess
        if seq_id not in self._open:
            return None
        start, guess = self._open[seq_id]
        came = ids[start : start + len(guess)]
        stood = next((k for k, pair in enumerate(zip(came, guess, strict=False)) if pair[0] != pair[1]), len(came))
        if stood == len(came) < len(guess):
            return None
        del self._open[seq_id]
        return seq_id, GUESS, stood
