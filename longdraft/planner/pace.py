"""How fast passes run against their prices: prices give the shape of the costs, observed passes the scale.

The logarithm of observed over predicted seconds is taken as the sum of the machine's pace at the moment, which all
passes share, and of a constant for each kind of pass, by which its price is wrong. Both are followed by a Kalman filter
that keeps variances only: what is uncertain moves, what is known stays, and a burst of other work moves little.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import exp, log, sqrt

NOISE = 0.06**2  # variance of one observation
MACHINE_START, MACHINE_DRIFT = 4.0, 1e-4  # variance at first, and what it grows by with each observation
KIND_START, KIND_DRIFT = 0.15**2, 4e-6
OUTLIER = 3.0  # standard deviations to which a surprise is cut


class Pace:
    """Factors by kind of pass. Reads no clock: seconds are told."""

    def __init__(self) -> None:
        self._machine, self._machine_variance = 0.0, MACHINE_START
        self._kinds: dict[Hashable, tuple[float, float, int]] = {}  # kind → offset, variance, observation number
        self._seen = 0

    def factor(self, kind: Hashable) -> float:
        """By which to multiply a price."""
        return exp(self._machine + self._kind(kind)[0])

    def observe(self, kind: Hashable, seconds: float, price: float) -> None:
        """A pass of some kind took ``seconds``; its price was ``price``."""
        if seconds <= 0 or price <= 0:
            return
        offset, variance = self._kind(kind)
        machine = self._machine_variance + MACHINE_DRIFT
        total = machine + variance + NOISE
        surprise = log(seconds / price) - self._machine - offset
        limit = OUTLIER * sqrt(total)
        surprise = min(max(surprise, -limit), limit)
        self._machine += machine / total * surprise
        self._machine_variance = machine * (1 - machine / total)
        self._seen += 1
        self._kinds[kind] = offset + variance / total * surprise, variance * (1 - variance / total), self._seen

    def _kind(self, kind: Hashable) -> tuple[float, float]:
        """Its offset and variance by now."""
        if kind not in self._kinds:
            return 0.0, KIND_START
        offset, variance, seen = self._kinds[kind]
        return offset, min(KIND_START, variance + KIND_DRIFT * (self._seen - seen))
