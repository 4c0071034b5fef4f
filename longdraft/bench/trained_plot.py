"""Tokens per round of trained drafts as a picture: bars with intervals, a panel per temperature."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.bench.acceptance_plot import COLOURS
from longdraft.bench.plot import figure_class

if TYPE_CHECKING:
    from longdraft.bench.trained import Evaluated


def plot_trained(found: Evaluated, file: Path, title: str) -> None:
    """Write a PNG of γ = k. Raises ``MissingDependencyError`` without matplotlib."""
    rows = [row for row in found.rows if row.gamma == found.k]
    temperatures = sorted({row.temperature for row in rows})
    contexts = sorted({row.context for row in rows})
    names = list(found.counts)
    size = (1.5 + 5.0 * len(temperatures), 1.6 + 0.35 * len(names) * (1 + len(contexts)))
    figure = figure_class()(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)[0]
    height = 0.8 / len(contexts)
    for axes, temperature in zip(panels, temperatures, strict=True):
        for n, context in enumerate(contexts):
            bars = [row for row in rows if (row.context, row.temperature) == (context, temperature)]
            places = [names.index(row.method) + height * (n - (len(contexts) - 1) / 2) for row in bars]
            values = [row.tokens_per_round for row in bars]
            spread = [(r.tokens_per_round - r.ci_low, r.ci_high - r.tokens_per_round) for r in bars]
            how = {"color": COLOURS[n % len(COLOURS)], "label": f"{context:,} tokens of context"}
            axes.barh(places, values, height, xerr=tuple(zip(*spread, strict=True)), capsize=2, **how)
            for place, row in zip(places, bars, strict=True):
                axes.text(row.ci_high, place, f"  {row.tokens_per_round:.2f}", va="center", fontsize=8)
        axes.set_title("greedy" if temperature == 0 else f"T = {temperature:g}", fontsize=10)
        axes.set_xlim(1, found.k + 1)
        axes.set_xlabel(f"tokens per round of {found.k} proposals, 95 % intervals")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.4, -0.6)  # the first one above
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(contexts), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=150)
