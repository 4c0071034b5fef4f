"""How often drafted tokens stand, by position, from what is seen of them online.

A round that proposed γ tokens of which k stood says that the first k stood, that the next one did not where k < γ, and
nothing about those behind it. So a position counts where all before it stood, and the rates are those of a token given
that the ones before it stand (the discrete hazards of censored survival data).

Each draft has a pool over all rows; a row's own figures are drawn towards its pool's while there are few of them. All
evidence fades: text changes.
"""

from __future__ import annotations

from collections.abc import Sequence

POOL_TRIES = 96  # that a pool remembers of a position, but over no fewer and no more rounds than
POOL_ROUNDS = 8, 32
OWN = 1 - 1 / 24  # what a row keeps of its evidence from round to round, where the position was reached for
IDLE = 1 - 1 / 128  # of either, where it was not
SLOW = 1 - 1 / 512  # of the long memory, which says what is usual of the draft's first position
PRIOR_WEIGHT, POOL_WEIGHT = 1.0, 3.0  # tries that a prior and the usual count as
RATIO_WEIGHT = 32.0  # tries that an assumed ratio of two drafts' refusals counts as
DOUBTED = 2.0  # tries that old evidence counts as when the text has changed
ALIKE, ALIKE_WEIGHT = 1 / 13, 4.0  # correlation of a row's tries before rows were compared, and what that counts as
LEAST_ALIKE, MOST_ALIKE = 0.02, 0.8
LOW, HIGH = 0.005, 0.995

Try = tuple[int, int, int]  # of a round: sequence id, tokens asked for, tokens that stood


class Counts:
    """Fading counts by position: how often a token was reached for, and how often it stood."""

    def __init__(self, positions: int) -> None:
        self.tried, self.stood = [0.0] * positions, [0.0] * positions
        self._at = 0  # the step up to which it has faded

    def at(self, step: int) -> Counts:
        """Itself, faded to ``step`` without further evidence."""
        if step > self._at:
            kept = IDLE ** (step - self._at)
            self.tried = [kept * x for x in self.tried]
            self.stood = [kept * x for x in self.stood]
            self._at = step
        return self

    def doubt(self) -> None:
        """The text has changed: what was seen before counts as a few tries at most."""
        kept = min(1.0, DOUBTED / max(self.tried[0], DOUBTED))
        self.tried = [kept * x for x in self.tried]
        self.stood = [kept * x for x in self.stood]

    def fade(self, asked: int, kept: float) -> None:
        """Make room for a round that reached for ``asked`` positions."""
        for i in range(min(asked, len(self.tried))):
            self.tried[i] *= kept
            self.stood[i] *= kept

    def add(self, asked: int, accepted: int) -> None:
        """Note a round: of up to ``asked`` tokens ``accepted`` stood."""
        for i in range(min(asked, accepted + 1, len(self.tried))):
            self.tried[i] += 1
            self.stood[i] += i < accepted


class Pool:
    """What all rows say of one draft."""

    def __init__(self, positions: int, prior: float) -> None:
        self.prior = prior
        self.counts = Counts(positions)
        self._usual_tried = self._usual_stood = 0.0

    def observe(self, step: int, rounds: Sequence[Try]) -> None:
        """Of all rows for which the draft was asked in a step."""
        counts = self.counts.at(step)
        fewest, most = POOL_ROUNDS
        counts.fade(max(asked for _, asked, _ in rounds), 1 - 1 / min(max(POOL_TRIES / len(rounds), fewest), most))
        self._usual_tried *= SLOW
        self._usual_stood *= SLOW
        for _, asked, accepted in rounds:
            counts.add(asked, accepted)
            self._usual_tried += 1
            self._usual_stood += accepted > 0

    def evidence(self, step: int) -> float:
        """Tries of the first position that still count."""
        return self.counts.at(step).tried[0]

    @property
    def usual(self) -> float:
        """The first position's rate in the long run."""
        return (self._usual_stood + PRIOR_WEIGHT * self.prior) / (self._usual_tried + PRIOR_WEIGHT)

    def rates(self, step: int, beside: Pool | None = None) -> list[float]:
        """By position. The first is drawn towards what is usual, each other one towards that before it.

        ``beside``: a draft of which more was seen lately. Texts are easy or hard for both, so what is usual is moved by
        how that one stands now: refusals keep their ratio.
        """
        counts = self.counts.at(step)
        out, before = [], self.usual
        if beside is not None:
            before = min(max(1 - self._refusals_over(beside) * (1 - beside.rates(step)[0]), LOW), HIGH)
        for tried, stood in zip(counts.tried, counts.stood, strict=True):
            before = (stood + POOL_WEIGHT * before) / (tried + POOL_WEIGHT)
            out.append(before)
        return out

    def _refusals_over(self, other: Pool) -> float:
        """How many times as often as the other draft's tokens its own are refused: as assumed, later as seen."""
        assumed, seen = (
            (1 - a) / max(1 - b, 1 - HIGH) for a, b in ((self.prior, other.prior), (self.usual, other.usual))
        )
        tried = min(self._usual_tried, other._usual_tried)
        weight = tried / (tried + RATIO_WEIGHT)
        return assumed ** (1 - weight) * seen**weight


class Own(Counts):
    """What one row says of one draft."""

    def observe(self, step: int, asked: int, accepted: int) -> None:
        """A round of the row."""
        self.at(step)
        self.fade(asked, OWN)
        self.add(asked, accepted)

    def rates(self, step: int, pool: Sequence[float], weight: float) -> list[float]:
        """By position, given the pool's, which count as ``weight`` tries, moved by how the row differs just before."""
        shift, out = 0.0, []
        self.at(step)
        for tried, stood, usual in zip(self.tried, self.stood, pool, strict=True):
            centre = min(max(usual + shift, LOW), HIGH)
            rate = (stood + weight * centre) / (tried + weight)
            shift = rate - usual
            out.append(rate)
        return out


def pool_weight(rows: Sequence[Own], rate: float) -> float:
    """How many tries of a row's own the pool's ``rate`` counts as: many where rows are alike, few where they differ.

    By the first position. The variance of a row's successes among n tries is n p q (1 + (n - 1) ρ) if its own rate
    varies (beta-binomial), which is solved for ρ over all rows; a prior with that correlation weighs (1 - ρ) / ρ.
    """
    excess, possible, p_q = ALIKE * ALIKE_WEIGHT, ALIKE_WEIGHT, rate * (1 - rate)
    for row in rows:
        tried, stood = row.tried[0], row.stood[0]
        excess += (stood - tried * rate) ** 2 - tried * p_q
        possible += max(0.0, tried * (tried - 1) * p_q)
    correlation = min(max(excess / possible, LEAST_ALIKE), MOST_ALIKE)
    return (1 - correlation) / correlation


def survival(rates: Sequence[float]) -> list[float]:
    """The chance that all of the first 1, 2, … tokens stand."""
    out, product = [], 1.0
    for rate in rates:
        product *= rate
        out.append(product)
    return out
