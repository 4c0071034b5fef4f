"""Acceptance as pictures: against budget, against context, and by position; a panel per kind of text and temperature.

Colours are Okabe and Ito's, told apart by the colour-blind; each draft also has a marker of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from longdraft.bench.acceptance_cells import AcceptanceCell
from longdraft.bench.plot import figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = "osD^vPX*"
APART = 0.04  # between neighbouring drafts' points, in octaves or positions, so that none hides another
MARGIN = 0.02  # of acceptance, so that no marker is cut
PANEL = 3.9, 3.1  # inches

Panel = tuple[str, float, int]  # task, temperature, tokens before the first position
Cells = list[AcceptanceCell]
T = TypeVar("T")


@dataclass(frozen=True)
class _Point:
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class View:
    """One picture. ``points`` gives a cell's; ``ticks`` all values of x, ``octaves`` whether their scale doubles."""

    name: str
    label: str
    fixed: str
    cells: Cells
    points: Callable[[AcceptanceCell], Iterator[_Point]]
    ticks: list[int]
    octaves: bool = True


def plot(cells: Sequence[AcceptanceCell], file: Path, title: str) -> list[Path]:
    """Write PNGs beside ``file`` with 95 % intervals, and return their names: ``NAME-budget.png``, ``NAME-context.png``
    and ``NAME-position.png``, the first two where there are several budgets or contexts.

    What is held fixed is the context or budget with most cells, of several the largest.
    """
    cells = largest_gammas(cells)
    names = list(dict.fromkeys(cell.draft for cell in cells))
    style = {n: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, n in enumerate(names)}
    return [_picture(view, style, file, title) for view in views_of(cells)]


def largest_gammas(cells: Sequence[AcceptanceCell]) -> Cells:
    """Of all that differ in γ alone the one with the largest: the others show nothing more."""
    kept: dict[object, AcceptanceCell] = {}
    for cell in cells:
        key = (_panel(cell), cell.context, cell.draft, cell.budget)
        if key not in kept or kept[key].gamma <= cell.gamma:
            kept[key] = cell
    return list(kept.values())


def _panel(cell: AcceptanceCell) -> Panel:
    return cell.task, cell.temperature, cell.after


def views_of(cells: Cells) -> Iterator[View]:
    """What is to be drawn."""
    bounded = [cell for cell in cells if cell.budget is not None] or cells
    budgets = sorted({cell.budget for cell in cells} - {None})
    contexts = sorted({cell.context for cell in cells})
    if len(budgets) > 1:
        context = _most_common(cell.context for cell in bounded)
        some = [cell for cell in cells if cell.context == context]
        yield View(
            "budget",
            "budget in tokens",
            f"context {context:,}",
            some,
            lambda c: _first(c, c.budget or budgets),
            budgets,
        )
    if len(contexts) > 1:
        budget = _most_common(cell.budget for cell in bounded)
        some = [cell for cell in cells if cell.budget in (None, budget)]
        yield View("context", "context in tokens", _budget(budget), some, lambda c: _first(c, c.context), contexts)
    context, budget = _crossing(bounded)
    some = [cell for cell in cells if cell.context == context and cell.budget in (None, budget)]
    fixed = ", ".join(filter(None, (f"context {context:,}", _budget(budget))))
    places = list(range(1, max(cell.gamma for cell in cells) + 1))
    yield View("position", "position, given that all before it stand", fixed, some, _places, places, octaves=False)


def _most_common(values: Iterable[T]) -> T:
    """Of several equally common ones the largest."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


def _crossing(cells: Cells) -> tuple[int, int | None]:
    """The context and budget that most cells have one of."""
    contexts, budgets = (Counter(getattr(cell, name) for cell in cells) for name in ("context", "budget"))
    pairs = {(cell.context, cell.budget) for cell in cells}
    return max(pairs, key=lambda pair: (contexts[pair[0]] + budgets[pair[1]], pair))


def _budget(budget: int | None) -> str:
    return "" if budget is None else f"budget {budget}"


def _first(cell: AcceptanceCell, at: int | list[int]) -> Iterator[_Point]:
    """The first position's; a draft without a budget has the same at each."""
    return (_Point(x, cell.acceptance, cell.ci_low, cell.ci_high) for x in (at if isinstance(at, list) else [at]))


def _places(cell: AcceptanceCell) -> Iterator[_Point]:
    both = zip(cell.acceptance_by_position, cell.ci_by_position, strict=True)
    return (_Point(n, value, *ends) for n, (value, ends) in enumerate(both, 1) if value is not None)


def _picture(view: View, style: dict[str, dict[str, str]], file: Path, title: str) -> Path:
    panels = _panels(view)
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    size = PANEL[0] * max(columns, 1.5), PANEL[1] * rows + 0.9
    figure = figure_class()(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    handles: dict[str, object] = {}
    for axes, (panel, cells) in zip(grid.flat, panels.items(), strict=False):
        _draw(axes, view, cells, style)
        axes.set_title(_named(panel), fontsize=10)
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    lowest = min((point.low for cell in view.cells for point in view.points(cell)), default=0.0)
    grid[0][0].set_ylim(lowest - MARGIN, 1 + MARGIN)  # they share it
    for axes in grid[:, 0]:
        axes.set_ylabel("acceptance")
    for axes in grid.flat[len(panels) - columns : len(panels)]:  # nothing lies below them
        axes.set_xlabel(view.label)
        axes.tick_params(labelbottom=True)
    shown = [name for name in style if name in handles]
    how = {"loc": "outside lower center", "ncols": 3 * columns, "frameon": False, "fontsize": 9}
    figure.legend([handles[name] for name in shown], shown, **how)
    figure.suptitle(f"Acceptance by {view.name}" + (view.fixed and f", {view.fixed}") + f"\n{title}", fontsize=11)
    target = file.with_name(f"{file.stem}-{view.name}.png")
    figure.savefig(target, dpi=110)
    return target


def _panels(view: View) -> dict[Panel, Cells]:
    """Those that are more than a point per draft, if there are any."""
    panels: dict[Panel, Cells] = {}
    for cell in view.cells:
        panels.setdefault(_panel(cell), []).append(cell)
    lines = {panel: some for panel, some in panels.items() if len({p.x for c in some for p in view.points(c)}) > 1}
    return lines or panels


def _named(panel: Panel) -> str:
    task, temperature, after = panel
    return f"{task}, T {temperature:g}" + (f", after {after} tokens" if after else "")


def _draw(axes: Axes, view: View, cells: Cells, style: dict[str, dict[str, str]]) -> None:
    """A line with intervals per draft."""
    for number, (draft, how) in enumerate(style.items()):
        own = [point for cell in cells if cell.draft == draft for point in view.points(cell)]
        if not own:
            continue
        own.sort(key=lambda point: point.x)
        shift = APART * (number - (len(style) - 1) / 2)
        x = [point.x * 2**shift if view.octaves else point.x + shift for point in own]
        spread = [[p.y - p.low for p in own], [p.high - p.y for p in own]]
        axes.errorbar(
            x,
            [p.y for p in own],
            yerr=spread,
            label=draft,
            capsize=2,
            linewidth=1.3,
            markersize=4.5,
            elinewidth=0.8,
            **how,
        )
    axes.grid(alpha=0.3)
    ticks = view.ticks
    if view.octaves:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)
    else:
        axes.set_xlim(ticks[0] - 0.5, ticks[-1] + 0.5)
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
