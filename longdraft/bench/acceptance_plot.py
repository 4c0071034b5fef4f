"""Acceptance as a picture: against budget, against context, and by position; a row per task and temperature.

Colours are Okabe and Ito's, told apart by the colour-blind; each draft also has a marker of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.bench.acceptance_cells import AcceptanceCell
from longdraft.bench.plot import figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class _Point:
    x: float
    y: float
    low: float
    high: float


def plot(cells: Sequence[AcceptanceCell], file: Path, title: str) -> None:
    """Write a PNG of the first position's acceptance (and the others', by position) with 95 % intervals."""
    longest = max(cell.gamma for cell in cells)
    cells = [cell for cell in cells if cell.gamma == longest]  # acceptance is the same for all
    rows = list(dict.fromkeys((cell.task, cell.temperature) for cell in cells))
    names = list(dict.fromkeys(cell.draft for cell in cells))
    style = {n: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, n in enumerate(names)}
    figure = figure_class()(figsize=(13, 0.9 + 3.1 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 3, squeeze=False, sharey="row")
    for axes, (task, temperature) in zip(grid, rows, strict=True):
        some = [cell for cell in cells if (cell.task, cell.temperature) == (task, temperature)]
        _row(axes, some, style)
        axes[0].set_ylabel(f"{task}, T {temperature:g}\nacceptance")
    handles, labels = grid[0][2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(names)), frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=130)


def _row(axes: Sequence[Axes], cells: list[AcceptanceCell], style: dict[str, dict[str, str]]) -> None:
    """Three pictures of one task and temperature; what is held fixed is the longest context and the largest budget."""
    context = max(cell.context for cell in cells)
    budget = max((cell.budget for cell in cells if cell.budget is not None), default=None)
    for number, (draft, how) in enumerate(style.items()):
        own = [cell for cell in cells if cell.draft == draft]
        at_length = [cell for cell in own if cell.context == context]
        at_budget = [cell for cell in own if cell.budget in (None, budget)]
        if any(cell.budget is None for cell in at_length):
            _level(axes[0], at_length[0], how)
        else:
            _line(axes[0], [_first(cell, cell.budget) for cell in at_length], number, how)
        _line(axes[1], [_first(cell, cell.context) for cell in at_budget], number, how)
        for cell in at_budget:
            if cell.context == context:
                _line(axes[2], _places(cell), number, how | {"label": draft})
    fixed = "" if budget is None else f", budget {budget}"
    for ax, text in zip(axes, (f"context {context:,}", fixed[2:], f"context {context:,}{fixed}"), strict=True):
        ax.set_title(text, fontsize=9)
        ax.grid(alpha=0.3)
        ax.set_ylim(-0.02, 1.02)
    _log2(axes[0], "budget in tokens", sorted({cell.budget for cell in cells if cell.budget is not None}))
    _log2(axes[1], "context in tokens", sorted({cell.context for cell in cells}))
    axes[2].set_xlabel("position (given that all before it stand)")
    longest = max(cell.gamma for cell in cells)
    axes[2].set_xticks(range(1, longest + 1))
    axes[2].set_xlim(0.5, longest + 0.5)


def _first(cell: AcceptanceCell, x: float) -> _Point:
    return _Point(x, cell.acceptance, cell.ci_low, cell.ci_high)


def _places(cell: AcceptanceCell) -> list[_Point]:
    both = zip(cell.acceptance_by_position, cell.ci_by_position, strict=True)
    return [_Point(n, value, *ends) for n, (value, ends) in enumerate(both, 1) if value is not None]


def _line(ax: Axes, points: list[_Point], number: int, how: dict[str, str]) -> None:
    """A draft's points with their intervals, a little apart from the other drafts' so that none hides another."""
    points = sorted(points, key=lambda point: point.x)
    x = [point.x * (1 + 0.012 * number) for point in points]
    spread = [[p.y - p.low for p in points], [p.high - p.y for p in points]]
    ax.errorbar(x, [p.y for p in points], yerr=spread, capsize=2.5, linewidth=1.4, markersize=5, **how)


def _level(ax: Axes, cell: AcceptanceCell, how: dict[str, str]) -> None:
    """A draft without a budget."""
    ax.axhline(cell.acceptance, color=how["color"], linestyle="--", linewidth=1.2)
    ax.axhspan(cell.ci_low, cell.ci_high, color=how["color"], alpha=0.12, linewidth=0)


def _log2(ax: Axes, label: str, ticks: list[int]) -> None:
    ax.set_xlabel(label)
    if ticks:
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.minorticks_off()
        ax.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)  # a single value is not a scale of its own
