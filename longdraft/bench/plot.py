"""Speed-ups as a picture: a heat-map over batch and context, or bars where one of the two has a single value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longdraft.bench import INSTALL, Cell
from longdraft.errors import InvalidValueError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = "PuOr"  # diverging, and told apart by the colour-blind
LEAST_RANGE = 0.2  # of log2: a few per cent shall not look like a victory


def check_plot(file: Path) -> None:
    """Raise now what would otherwise be found out after hours: ``MissingDependencyError`` or ``InvalidValueError``."""
    figure_class()
    if file.suffix != ".png":
        raise InvalidValueError("--plot", str(file), "must end in .png")


def plot(cells: Sequence[Cell], file: Path, title: str) -> None:
    """Write a PNG: the best speed-up per batch and context where both vary, else every arm's with its interval."""
    batches, contexts = sorted({c.batch for c in cells}), sorted({c.context for c in cells})
    grid = len(batches) > 1 and len(contexts) > 1
    width = 2.5 + 1.1 * len(contexts) if grid else 8.0
    height = 2.0 + 0.7 * (len(batches) if grid else len(cells))
    figure = figure_class()(figsize=(max(width, 6.0), min(height, 40.0)), layout="constrained")
    axes = figure.add_subplot()
    if grid:
        best = np.full((len(batches), len(contexts)), np.nan)
        for cell in cells:
            at = batches.index(cell.batch), contexts.index(cell.context)
            best[at] = np.fmax(best[at], cell.speedup)
        heat_map(figure, axes, best, batches, contexts)
    else:
        _bars(axes, cells)
    simulated = ", SIMULATED acceptance" if any(c.simulated for c in cells) else ""
    axes.set_title(title + simulated, fontsize=10)
    figure.savefig(file, dpi=150)


def figure_class() -> type[Figure]:
    """Matplotlib's figures without a window: ``savefig`` draws a PNG by Agg."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "--plot", INSTALL) from error
    return Figure


def heat_map(
    figure: Figure,
    axes: Axes,
    best: np.ndarray,
    batches: Sequence[int],
    contexts: Sequence[int],
    label: str = "best speed-up over plain decoding",
) -> None:
    """Draw ``best [batches, contexts]``, ratios of which ``label`` says what they are; NaN where there is none."""
    from matplotlib.colors import CenteredNorm
    from matplotlib.ticker import FuncFormatter

    # Logarithms, so that twice as slow is as dark as twice as fast.
    scale = np.log2(best)
    norm = CenteredNorm(0, max(LEAST_RANGE, float(np.nanmax(np.abs(scale)))))
    image = axes.imshow(scale, cmap=COLOURS, norm=norm, origin="lower", aspect="auto")
    for (y, x), value in np.ndenumerate(best):
        if not np.isnan(value):
            dark = abs(norm(scale[y, x]) - 0.5) > 0.35
            axes.text(x, y, f"{value:.2f}x", ha="center", va="center", color="white" if dark else "black")
    axes.set_xticks(range(len(contexts)), [f"{n:,}" for n in contexts])
    axes.set_yticks(range(len(batches)), [str(n) for n in batches])
    axes.set_xlabel("context in tokens")
    axes.set_ylabel("batch")
    shown = FuncFormatter(lambda value, _: f"{2**value:.2f}x")
    figure.colorbar(image, ax=axes, label=label, format=shown)


def _bars(axes: Axes, cells: Sequence[Cell]) -> None:
    speed = np.array([c.speedup for c in cells])
    ends = np.array([[c.ci_low, c.ci_high] for c in cells]).T
    colours = ["tab:purple" if value > 1 else "tab:orange" for value in speed]
    spread = np.abs(ends - speed)
    axes.barh(range(len(cells)), speed - 1, left=1, xerr=spread, color=colours, height=0.6, capsize=3)
    axes.axvline(1, color="black", linewidth=1)
    names = [f"{c.batch} x {c.context:,}, {c.shown.label}, T {c.temperature:g}: {c.speedup:.2f}x" for c in cells]
    axes.set_yticks(range(len(cells)), names)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("speed-up over plain decoding, with its 95 % interval")
