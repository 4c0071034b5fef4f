"""A calibration as a picture: predicted against measured, and the errors of each kind of point."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longdraft.bench.calibrate import Outcome
from longdraft.bench.calibrate_points import Point
from longdraft.bench.plot import figure_class
from longdraft.planner.curves import kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BANDS = ((0.25, "0.93"), (0.10, "0.85"))  # relative errors, and the grey of each


def plot_calibration(outcome: Outcome, file: Path) -> None:
    """Write a PNG; points that were held out are filled."""
    figure = figure_class()(figsize=(13, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    groups: dict[str, list[int]] = {}
    for i, m in enumerate(outcome.measured):
        groups.setdefault(_group(m.point), []).append(i)
    measured = np.array([m.seconds for m in outcome.measured]) * 1e3
    predicted = np.array(outcome.predicted) * 1e3
    held = np.array([m.point.held_out for m in outcome.measured])
    _diagonal(left, measured)
    for band, grey in BANDS:
        right.axvspan(-100 * band, 100 * band, color=grey, linewidth=0)
    for number, members in enumerate(groups.values()):
        at, colour = np.array(members), f"C{number % 10}"
        errors = 100 * (predicted / measured - 1)
        for axes, x, y in ((left, measured, predicted), (right, errors, np.full(len(measured), number))):
            axes.scatter(x[at], y[at], s=34, facecolors=np.where(held[at], colour, "none"), edgecolors=colour)
    right.set_yticks(range(len(groups)), groups)
    right.invert_yaxis()
    right.set_xlabel("predicted over measured − 1, in %")
    right.set_title("filled: held out; grey: 10 % and 25 %", fontsize=10)
    about = outcome.calibration
    errors = about.errors
    said = f"held out: median {errors.median:.1%}, worst {errors.worst:.1%} of {errors.points} points"
    where = f"{about.setting.dtype}, {about.setting.kernels}, {about.setting.threads} threads"
    figure.suptitle(f"{about.name} on {about.setting.machine}, {where}; {said}", fontsize=11)
    figure.savefig(file, dpi=150)


def _group(point: Point) -> str:
    if point.draft is None:
        return "passes of the target"
    return f"noted for {point.draft.kv}" if point.noted else kind(point.draft)


def _diagonal(axes: Axes, measured: np.ndarray) -> None:
    ends = np.array([measured.min() / 1.5, measured.max() * 1.5])
    for band, grey in BANDS:
        axes.fill_between(ends, ends / (1 + band), ends * (1 + band), color=grey, linewidth=0)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured, ms")
    axes.set_ylabel("predicted, ms")
