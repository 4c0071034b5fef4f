"""Ratios of sums over prompts, with bootstrap intervals.

Prompts are drawn, not positions: those of one prompt are alike. Two drafts are compared on the same prompts: a resample
draws prompts for both at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longdraft.bench import bounds, resampled


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """``sum(top) / sum(bottom)`` over prompts, ``[P]`` each."""

    top: np.ndarray
    bottom: np.ndarray

    @property
    def known(self) -> bool:
        """Whether there is a value: something was counted, for every prompt."""
        return bool(np.isfinite(self.top).all() and self.bottom.sum() > 0)

    def estimate(self, seed: int = 0) -> Estimate | None:
        """The ratio and its interval; ``None`` where it is not known. Takes two prompts at least."""
        return _estimate((self.top, self.bottom), _ratio, seed) if self.known else None

    def minus(self, other: Ratio, seed: int = 0) -> Estimate | None:
        """The difference from another draft's ratio on the same prompts."""
        if not (self.known and other.known):
            return None
        return _estimate((self.top, self.bottom, other.top, other.bottom), _difference, seed)


def _estimate(samples: tuple[np.ndarray, ...], statistic: object, seed: int) -> Estimate:
    samples = tuple(np.asarray(x, dtype=float) for x in samples)
    return Estimate(float(statistic(*samples, axis=-1)), *bounds(resampled(samples, statistic, seed)))


def _ratio(top: np.ndarray, bottom: np.ndarray, axis: int) -> np.ndarray:
    """NaN where a resample has nothing below."""
    total = bottom.sum(axis)
    return np.divide(top.sum(axis), total, out=np.full(np.shape(total), np.nan), where=total > 0)


def _difference(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, axis: int) -> np.ndarray:
    return _ratio(a, b, axis) - _ratio(c, d, axis)
