"""When a draft chooses anew what it reads: after so many rounds, or when fewer of its proposals are accepted.

What is returned never depends on it; only how much is accepted does.
"""

from __future__ import annotations

from dataclasses import dataclass

from longdraft.core import SequenceStats

TAIL = 4  # a choice without a date leaves one part in so many of the budget to the tokens that come after it
MEMORY = 8  # rounds over which acceptance is averaged, and before which it is not judged
FALL = 0.8  # it has fallen when it is below so much of its best since the choice


@dataclass
class Since:
    """The rounds of one sequence since a choice was made for it, and what became of their proposals."""

    rounds: int = 0  # the one that is about to begin included
    drafted: int = 0  # totals of the sequence up to the last round
    accepted: int = 0
    recent: float = 0.0  # accepted share, a running mean
    best: float = 0.0  # the highest that was

    @classmethod
    def now(cls, stats: SequenceStats) -> Since:
        """From the round that is about to begin."""
        return cls(1, sum(stats.drafted), sum(stats.accepted))

    def due(self, refresh: int | str, stats: SequenceStats) -> bool:
        """Asked once before every round: whether that should begin with a new choice, ``refresh`` as in DraftConfig."""
        self.rounds += 1
        if refresh != "auto":
            return 0 < refresh < self.rounds
        return self._fallen(sum(stats.drafted), sum(stats.accepted))

    def _fallen(self, drafted: int, accepted: int) -> bool:
        if drafted > self.drafted:
            share = (accepted - self.accepted) / (drafted - self.drafted)
            done = self.rounds - 1
            self.recent += (share - self.recent) / min(done, MEMORY)
            self.drafted, self.accepted = drafted, accepted
            if done >= MEMORY:
                self.best = max(self.best, self.recent)
        return self.recent < FALL * self.best


def spare(refresh: int | str, budget: int, gamma: int) -> int:
    """Tokens of ``budget`` to leave free for those that come before the next choice, the first round's apart.

    None where each round chooses; else what the rounds up to a date can bring, but no more than without a date.
    """
    free = max(0, budget // TAIL - gamma)
    return free if refresh in (0, "auto") else min(free, (refresh - 1) * (gamma + 1))
