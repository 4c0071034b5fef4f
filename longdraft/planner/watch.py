"""A draft that costs next to nothing says before every choice what it would propose: n-grams.

How much it has to say, that is how many of the text's last tokens it has found before, tells how often it is right,
whatever the text: one that repeats itself is told from one that does not at once. So its acceptance is known by kind of
guess, not by row. A guess is compared with the text as it comes and counts as a round of its own, also where it was not
used or only in part; the next one that is followed is made where that round would have ended.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence

from longdraft.core import Round
from longdraft.planner.estimate import Pool, Try, survival

LONG = (4, 8, 16)  # tokens from which on a guess is of the next kind; no more are asked for
PRIORS = (0.5, 0.75, 0.85, 0.95)  # how often the tokens of these kinds are assumed to stand before any was seen


class Watch:
    """Of one draft, over all sequences."""

    def __init__(self, positions: int) -> None:
        """``positions``: most tokens of a guess that are used."""
        self.positions = positions
        self.pools = [Pool(positions, rate) for rate in PRIORS]
        self._open: dict[int, tuple[int, int, Sequence[int]]] = {}  # sequence id → start, kind, guess that is followed

    def observe(self, rounds: Sequence[Round], guesses: Mapping[int, Sequence[int]], step: int) -> None:
        """After a step before which the draft had said ``guesses``, by sequence id."""
        decided: dict[int, list[Try]] = {}
        for r in rounds:
            if found := self._observe(r, guesses.get(r.row.seq.id, ())):
                decided.setdefault(found[0], []).append(found[1])
        for kind, tries in decided.items():
            self.pools[kind].observe(step, tries)

    def survival(self, guesses: Sequence[Sequence[int]], step: int) -> list[list[float]]:
        """For each guess the chance that all of the first 1, 2, … of its tokens stand."""
        by_kind = [survival(pool.rates(step)) for pool in self.pools]
        return [by_kind[bisect(LONG, len(guess))][: len(guess)] for guess in guesses]

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._open.pop(seq_id, None)

    def _observe(self, r: Round, guess: Sequence[int]) -> tuple[int, Try] | None:
        """The kind of a guess that is decided now, and its round."""
        seq = r.row.seq
        if seq.id not in self._open:
            if not guess:
                return None
            self._open[seq.id] = len(seq.ids) - r.tokens, bisect(LONG, len(guess)), guess[: self.positions]
        start, kind, guess = self._open[seq.id]
        came = seq.ids[start : start + len(guess)]
        stood = next((k for k, pair in enumerate(zip(came, guess, strict=False)) if pair[0] != pair[1]), len(came))
        if stood == len(came) < len(guess):
            return None  # so far
        del self._open[seq.id]
        return kind, (seq.id, len(guess), stood)
