"""A draft that costs next to nothing is asked at every step, whether or not it is to propose: n-grams.

How much it has to say, that is how many of the text's last tokens it has found before, tells how often it is right,
whatever the text: one that repeats itself is told from one that does not at once. So its acceptance is known by kind of
guess, not by row. A guess is compared with the text as it comes and counts as a round of its own, also where it was not
used or only in part; the next one that is followed is made where that round would have ended.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from longdraft.core import Round
from longdraft.planner.estimate import Pool, Try, survival

LONG = (4, 8)  # tokens from which on a guess is of the next kind; no more are asked for
PRIORS = (0.5, 0.9)  # how often the tokens of these kinds are assumed to stand before any was seen


class Watch:
    """Of one draft, over all sequences."""

    def __init__(self, positions: int, prior: float) -> None:
        """``prior``: how often tokens of the shortest guesses are assumed to stand."""
        self.pools = [Pool(positions, rate) for rate in (prior, *PRIORS)]
        self._open: dict[int, tuple[int, tuple[int, ...]]] = {}  # sequence id → a guess that is followed, and its start
        self._kinds: dict[int, int] = {}  # sequence id → of the guess that would be made now

    def kind(self, seq_id: int) -> int:
        """That of a sequence's next guess, as far as the last one and what came of it say."""
        return self._kinds.get(seq_id, 0)

    def observe(self, rounds: Sequence[Round], step: int) -> None:
        """After a step, with the guesses that were made in it."""
        decided: dict[int, list[Try]] = {}
        for r in rounds:
            if r.row.guess is not None and (found := self._observe(r, r.row.guess)):
                decided.setdefault(found[0], []).append(found[1])
        for kind, tries in decided.items():
            self.pools[kind].observe(step, tries)

    def survival(self, seq_ids: Sequence[int], step: int) -> list[list[float]]:
        """By row, the chance that all of the first 1, 2, … tokens stand."""
        by_kind = [survival(pool.rates(step)) for pool in self.pools]
        return [by_kind[self.kind(seq_id)] for seq_id in seq_ids]

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._open.pop(seq_id, None)
        self._kinds.pop(seq_id, None)

    def _observe(self, r: Round, guess: tuple[int, ...]) -> tuple[int, Try] | None:
        """The kind of a guess that is decided now, and its round."""
        seq = r.row.seq
        start, kind = len(seq.ids) - r.tokens, bisect(LONG, len(guess))
        stood, _ = _compared(guess, seq.ids[start : start + len(guess)])
        self._kinds[seq.id] = 0 if stood < min(len(guess), r.tokens) else kind
        start, guess = self._open.setdefault(seq.id, (start, guess))
        stood, decided = _compared(guess, seq.ids[start : start + len(guess)])
        if not decided:
            return None
        del self._open[seq.id]
        return bisect(LONG, len(guess)), (seq.id, LONG[-1], stood)


def _compared(guess: Sequence[int], came: Sequence[int]) -> tuple[int, bool]:
    """How many of the guessed tokens stood so far, and whether it stays at that."""
    stood = next((k for k, pair in enumerate(zip(came, guess, strict=False)) if pair[0] != pair[1]), len(came))
    return stood, stood < len(came) or len(came) == len(guess)
