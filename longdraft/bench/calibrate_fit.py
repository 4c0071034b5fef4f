"""Measured points → the constants of curves, and of the roofline model.

All are fitted by least squares of relative errors, none is negative, and points held out are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from longdraft.bench import INSTALL
from longdraft.bench.calibrate_points import Measured, Point
from longdraft.drafts.registry import watches
from longdraft.errors import MissingDependencyError
from longdraft.planner.assumed import given
from longdraft.planner.candidates import Target, candidate
from longdraft.planner.cost import pass_work, times
from longdraft.planner.curves import (
    ChoiceCurve,
    Curves,
    DraftCurve,
    NotingCurve,
    PassCurve,
    draft_steps,
    keys_read,
    kind,
    reads_of,
)
from longdraft.planner.hardware import OVERLAPS, Hardware

KNEES = (0, *range(2, 33, 2))  # tokens beyond which arithmetic may no longer hide
QUERIES = (1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)  # and the same of a row's queries, over its keys
# What the roofline model is fitted with: first guess, least and most.
ROOFLINE = {
    "tflops": (1.0, 1e-5, 1e6),
    "bandwidth_gb_s": (50.0, 1e-3, 1e6),
    "layer_s": (1e-5, 1e-9, 1.0),
    "row_s": (1e-5, 1e-9, 1.0),
}

Predict = Callable[[Hardware], float]


def fit_curves(measured: Sequence[Measured], wakes: Mapping[str, float]) -> Curves:
    """Curves of the target and of every kind of draft in ``measured``; ``wakes``: kind → seconds per token."""
    fitted = [m for m in measured if not m.point.held_out]
    kinds: dict[str, list[Measured]] = defaultdict(list)
    for m in fitted:
        if m.point.draft:
            kinds[kind(m.point.draft)].append(m)
    drafts = {name: _draft(group, wakes.get(name, 0.0)) for name, group in kinds.items()}
    return Curves(_passes([m for m in fitted if m.point.draft is None]), drafts)


def predict(curves: Curves, point: Point) -> float:
    """Seconds that ``curves`` give a point."""
    if point.draft is None:
        return curves.target(point.lengths, point.sizes)
    if point.noted:
        return curves.target(point.lengths, point.sizes) + curves.noting(point.draft, point.lengths, point.sizes)
    return curves.propose(point.draft, point.lengths, point.sizes)


def spread(errors: Sequence[float]) -> tuple[float, float]:
    """The median and the largest of relative errors, in size."""
    sizes = [abs(error) for error in errors] or [0.0]
    return median(sizes), max(sizes)


def fit_roofline(target: Target, measured: Sequence[Measured]) -> tuple[Hardware, list[float]]:
    """``target.hardware`` with the constants by which the roofline model fits best, and its errors where held out.

    It knows nothing of choosing and of rows that differ, so such points are left out.
    """
    least_squares = _scipy("least_squares")
    pairs = [(m, _roofline(target, m.point)) for m in measured if not m.extra_s and _even(m.point)]
    fitted = [(predict, m.seconds) for m, predict in pairs if not m.point.held_out]

    def hardware(logs: np.ndarray, overlap: str) -> Hardware:
        constants = dict(zip(ROOFLINE, map(float, np.exp(logs)), strict=True))
        return Hardware(**{**vars(target.hardware), **constants, "overlap": overlap})

    def residuals(logs: np.ndarray, overlap: str) -> list[float]:
        found = hardware(logs, overlap)
        return [np.log(predict(found) / seconds) for predict, seconds in fitted]

    begin, low, high = np.log(list(ROOFLINE.values())).T
    tries = []
    for overlap in OVERLAPS:
        done = least_squares(residuals, begin, bounds=(low, high), args=(overlap,), loss="soft_l1")
        tries.append((done.cost, overlap, done.x))
    _, overlap, logs = min(tries, key=lambda t: t[0])
    best = hardware(logs, overlap)
    return best, [predict(best) / m.seconds - 1 for m, predict in pairs if m.point.held_out]


def _even(point: Point) -> bool:
    return len(set(point.lengths)) == len(set(point.sizes)) == 1


def _roofline(target: Target, point: Point) -> Predict:
    """What the roofline model says of a point, on any hardware."""
    rows, size = {point.lengths[0]: len(point.lengths)}, point.sizes[0]
    if point.draft is None:
        return lambda hardware: times(pass_work(target.network, rows, size), hardware).total
    draft = candidate(target, point.draft, given(1.0))
    return lambda hardware: size * times(pass_work(draft.network, rows, reads=draft.reads), hardware).total


def _draft(group: Sequence[Measured], wake_s: float) -> DraftCurve:
    config = group[0].point.draft
    proposed = [m for m in group if not m.point.noted]
    noted = [m for m in group if m.point.noted]
    step, choice, noting = None, ChoiceCurve(), NotingCurve()
    if config.weights != "ngram":
        step = _passes(proposed)
    if watches(config) or step is None:
        terms = [ChoiceCurve.terms(m.point.lengths, reads_of(m.point.draft, m.point.lengths)) for m in proposed]
        choice = ChoiceCurve(*_extras(terms, proposed))
    if noted:
        noting = NotingCurve(*_extras([NotingCurve.terms(m.point.lengths, m.point.sizes) for m in noted], noted))
    return DraftCurve(step, choice, noting, wake_s)


def _extras(terms: Sequence[Sequence[float]], measured: Sequence[Measured]) -> list[float]:
    """Constants for ``extra_s``, errors relative to all that the point takes."""
    return solve(terms, [m.extra_s for m in measured], [m.seconds for m in measured])


def _passes(measured: Sequence[Measured]) -> PassCurve:
    """The curve whose knee and number of free queries fit best; the smallest ones among equals."""
    seconds = [m.seconds - m.extra_s for m in measured]
    passes = [list(_reads(m.point)) for m in measured]
    best: tuple[float, PassCurve] | None = None
    for queries in QUERIES if any(t > 1 for p in passes for _, tokens in p for t in tokens) else QUERIES[:1]:
        for knee in KNEES:
            terms = [np.sum([PassCurve.terms(*one, knee, queries) for one in p], axis=0) for p in passes]
            constants = solve(terms, seconds, seconds)
            error = float(np.mean((np.array(terms) @ constants / seconds - 1) ** 2))
            if best is None or error < best[0] * (1 - 1e-9):
                best = error, PassCurve(*constants, knee, queries)
    return best[1]


def _reads(point: Point) -> list[tuple[list[int], Sequence[int]]]:
    """Keys and tokens of each pass that a point runs."""
    if point.draft is None:
        return [(keys_read(point.lengths, point.sizes), point.sizes)]
    return [(reads, [1] * len(reads)) for reads in draft_steps(point.draft, point.lengths, point.sizes)]


def solve(terms: Sequence[Sequence[float]], values: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Constants, none below 0, for which ``terms [n, k]`` give ``values [n]``; errors are relative to ``sizes [n]``."""
    nnls = _scipy("nnls")
    weighted = np.asarray(terms, dtype=float) / np.asarray(sizes)[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0  # a term that no point has
    found, _ = nnls(weighted / scale, np.asarray(values) / np.asarray(sizes))
    return [float(c) for c in found / scale]


def _scipy(name: str) -> Callable[..., object]:
    try:
        from scipy import optimize
    except ImportError as error:
        raise MissingDependencyError("scipy", "Fitting curves", INSTALL) from error
    return getattr(optimize, name)
