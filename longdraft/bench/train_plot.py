"""A training run as a picture: each figure of its log over tokens, of training texts and of held-out ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from longdraft.bench.plot import figure_class

SHOWN = ("loss", "acceptance", "kl", "accuracy")
SMOOTH = 50  # points of the drawn line; each is a mean of the steps around it


def plot_training(records: Sequence[Mapping[str, object]], file: Path, title: str) -> None:
    """Write a PNG of a log's records (``train/state.py``). Raises ``MissingDependencyError`` without matplotlib."""
    steps = [r for r in records if "held_out" not in r]
    tested = [r for r in records if "held_out" in r]
    known = {name for r in steps for name in r} | {name for r in tested for name in r["held_out"]}
    names = [name for name in SHOWN if name in known]
    figure = figure_class()(figsize=(8.0, 1.0 + 2.6 * max(1, len(names))), layout="constrained")
    tokens = {0: 0} | {r["step"]: r["tokens"] for r in steps}
    for n, name in enumerate(names):
        axes = figure.add_subplot(len(names), 1, n + 1)
        line = [(r["tokens"], r[name]) for r in steps if r.get(name) is not None]
        if line:
            x, y = np.array(line, float).T
            axes.plot(x, y, color="tab:purple", alpha=0.25, linewidth=0.8)
            axes.plot(*_smooth(x, y), color="tab:purple", label="training texts")
        points = [
            (tokens.get(r["step"], 0), r["held_out"][name]) for r in tested if r["held_out"].get(name) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color="tab:orange", markersize=4, label="held-out texts")
        axes.set_ylabel(name)
        axes.legend(loc="best", fontsize=8)
    figure.suptitle(title, fontsize=10)
    if names:
        axes.set_xlabel("tokens")
    figure.savefig(file, dpi=150)


def _smooth(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of equal runs of points, ``SMOOTH`` of them at most."""
    parts = np.array_split(np.arange(len(x)), min(SMOOTH, len(x)))
    return np.array([x[part].mean() for part in parts]), np.array([y[part].mean() for part in parts])
