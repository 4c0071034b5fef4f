"""How fast passes run against their prices: prices give the shape of the costs, observed passes the scale.

The logarithm of observed over predicted seconds is taken as the sum of the machine's pace at the moment, which all
passes share, and of constants by which prices are wrong: one for each kind of pass, and one for that kind in batches of
about this size and length. All are followed by a Kalman filter that keeps variances only: what is uncertain moves, what
is known stays, and a burst of other work moves little. A pass that was not seen in some batches is taken to be somewhat
faster than is likely: else one that is as slow as it was thought to be is never looked at.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import exp, log, sqrt

NOISE = 0.06**2  # variance of one observation
COLD = 0.5**2  # of the first one: memory is touched for the first time
HOPE = 0.5  # standard deviations by which a kind that was never seen is hoped to be faster
MACHINE_START, MACHINE_DRIFT = 4.0, 1e-4  # variance at first, and what it grows by with each observation
PART_START, PART_DRIFT = (0.15**2, 0.1**2), (4e-6, 2e-5)  # of a kind, and of it in some batches
OUTLIER, FIRST = 3.0, 1.0  # standard deviations to which a surprise is cut; of a kind that was never seen


Kind = tuple[Hashable, ...]  # what a pass is, then also in what batch


class Pace:
    """Factors by kind of pass. Reads no clock: seconds are told."""

    def __init__(self) -> None:
        self._machine, self._machine_variance = 0.0, MACHINE_START
        self._parts: dict[Hashable, tuple[float, float, int]] = {}  # → offset, variance, observation number
        self._seen = 0

    def factor(self, kind: Kind) -> float:
        """By which to multiply a price."""
        parts = [self._part(kind, depth) for depth in range(len(kind))]
        hope = 0.0 if kind[-1] in self._parts else HOPE * sqrt(sum(variance for _, variance in parts))
        return exp(self._machine + sum(offset for offset, _ in parts) - hope)

    def observe(self, kind: Kind, seconds: float, price: float) -> None:
        """A pass of some kind took ``seconds``; its price was ``price``."""
        if seconds <= 0 or price <= 0:
            return
        parts = [self._part(kind, depth) for depth in range(len(kind))]
        machine = self._machine_variance + MACHINE_DRIFT
        total = machine + sum(variance for _, variance in parts) + (NOISE if self._seen else COLD)
        surprise = log(seconds / price) - self._machine - sum(offset for offset, _ in parts)
        known = not self._seen or kind[-1] in self._parts  # else one burst of other work would condemn it for good
        limit = (OUTLIER if known else FIRST) * sqrt(total)
        surprise = min(max(surprise, -limit), limit)
        self._machine += machine / total * surprise
        self._machine_variance = machine * (1 - machine / total)
        self._seen += 1
        for name, (offset, variance) in zip(kind, parts, strict=True):
            gain = variance / total
            self._parts[name] = offset + gain * surprise, variance * (1 - gain), self._seen

    def tried(self, kind: Kind) -> None:
        """A pass of that kind was meant to be; whether it came to it or not, it is hoped of no longer."""
        self._parts.setdefault(kind[-1], (0.0, PART_START[len(kind) - 1], self._seen))

    def _part(self, kind: Kind, depth: int) -> tuple[float, float]:
        """The offset and variance of a part by now."""
        start, drift = PART_START[depth], PART_DRIFT[depth]
        if kind[depth] not in self._parts:
            return 0.0, start
        offset, variance, seen = self._parts[kind[depth]]
        return offset, min(start, variance + drift * (self._seen - seen))
