"""How fast passes run against their prices: prices give the shape of the costs, observed passes the scale.

A pass takes a · (base + b · more) seconds: ``base`` is the price of a pass of one token per row, which waits for
memory, ``more`` what further tokens add to it, which is arithmetic. The two speeds of a machine change independently.
log a is the sum of the machine's pace at the moment, which all passes share, and of constants by which prices are
wrong: one for each kind of pass, and one for that kind in batches of about this size and length; log b is the sum of
two such constants. All are followed by one extended Kalman filter: what is uncertain moves, what is known stays, and a
burst of other work moves little. It keeps covariances, since only sums are ever seen: once plain passes are known, long
ones that are slower than they should be speak of b. A pass that was not seen in some batches is taken to be somewhat
faster than is likely: else one that is as slow as it was thought to be is never looked at.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import exp, log, sqrt

import numpy as np

NOISE = 0.06**2  # variance of one observation
HOPE = 0.5  # standard deviations by which a kind that was never seen is hoped to be faster
MACHINE = 4.0, 1e-4  # variance at first, and what it grows by with each observation
BASE = (0.15**2, 1e-6), (0.1**2, 5e-6)  # the same of a kind, and of it in some batches
MORE = (0.4**2, 1e-4), (0.15**2, 2e-5)  # and of what further tokens add
OUTLIER, FIRST = 3.0, 1.0  # standard deviations to which a surprise is cut; of a kind that was never seen

Kind = tuple[Hashable, ...]  # what a pass is, then also in what batch
Sizes = tuple[tuple[float, float], ...]


class Pace:
    """Factors by kind of pass. Reads no clock: seconds are told."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._mean, self._drift, self._cov = np.zeros(0), np.zeros(0), np.zeros((0, 0))
        self._seen: set[Hashable] = set()
        self._machine = self._places(("machine",), (MACHINE,))

    def factors(self, kind: Kind) -> tuple[float, float]:
        """By which to multiply the two parts of a price."""
        hope = 0.0 if kind[-1] in self._seen else HOPE * sqrt(sum(start for start, _ in BASE[: len(kind)]))
        base = self._mean[0] + self._sum(kind) - hope
        return exp(base), exp(base + self._sum(_more(kind)))

    def observe(self, kind: Kind, seconds: float, base: float, more: float = 0.0) -> None:
        """A pass of some kind took ``seconds``; its price was ``base + more``."""
        if seconds <= 0 or base <= 0:
            return
        parts = self._machine + self._places(kind, BASE)
        extra = self._places(_more(kind), MORE) if more > 0 else []
        added = more * exp(self._mean[extra].sum())
        share = added / (base + added)  # by how much the logarithm of the seconds moves with log b
        weights, places = np.array([1.0] * len(parts) + [share] * len(extra)), parts + extra
        self._cov.flat[:: len(self._mean) + 1] += self._drift
        along = weights @ self._cov[places]
        total = weights @ along[places] + NOISE
        surprise = log(seconds / (base + added)) - self._mean[parts].sum()
        known = not self._seen or kind[-1] in self._seen  # else one burst of other work would condemn it for good
        limit = (OUTLIER if known else FIRST) * sqrt(total)
        self._mean += along * (min(max(surprise, -limit), limit) / total)
        if abs(surprise) <= limit:  # an outlier makes nothing more certain
            self._cov -= np.outer(along, along / total)
        self._seen.add(kind[-1])

    def _sum(self, kind: Kind) -> float:
        """Of the constants of a kind, as far as there are any."""
        return sum(self._mean[self._numbers[name]] for name in kind if name in self._numbers)

    def _places(self, kind: Kind, sizes: Sizes) -> list[int]:
        """The numbers of a kind's constants, new ones among them."""
        for name, (start, drift) in zip(kind, sizes, strict=False):
            if name not in self._numbers:
                self._numbers[name] = len(self._mean)
                self._mean, self._drift = np.append(self._mean, 0.0), np.append(self._drift, drift)
                self._cov = np.pad(self._cov, (0, 1))
                self._cov[-1, -1] = start
        return [self._numbers[name] for name in kind]


def paced(factors: tuple[float, float], plain: float, whole: float) -> float:
    """Seconds of a pass of price ``whole``, ``plain`` with one token per row; ``factors``: those of its kind."""
    base, more = factors
    return base * plain + more * (whole - plain)


def _more(kind: Kind) -> Kind:
    return tuple(("more", name) for name in kind)
