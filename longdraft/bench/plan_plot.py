"""A plan as a picture: where speculation pays over batch and context, and what it gains at other acceptances."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longdraft.bench.plot import figure_class, heat_map
from longdraft.planner.assumed import given
from longdraft.planner.memory import memory
from longdraft.planner.plan import Planner

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORTEST = 1024
CURVES = 5
RATES = [i / 40 for i in range(41)]


def plot_plan(
    planner: Planner, batch: int, context: int, batches: Sequence[int], contexts: Sequence[int], file: Path
) -> None:
    """Write a PNG. Left: the best speed-up over ``batches`` and ``contexts``, or around (``batch``, ``context``) where
    they are no grid; right: every draft's speed-up there against its acceptance."""
    if len(batches) < 2 or len(contexts) < 2:
        batches, contexts = _around(planner, batch, context)
    figure = figure_class()(
        figsize=(5.5 + 0.9 * len(contexts), max(4.5, 1.5 + 0.5 * len(batches))), layout="constrained"
    )
    left, right = figure.subplots(1, 2, width_ratios=[1 + 0.12 * len(contexts), 1])
    best = np.array([[planner.best_speedup(b, n) or np.nan for n in contexts] for b in batches])
    heat_map(figure, left, best, batches, contexts)
    left.tick_params(axis="x", rotation=45)
    _frontiers(left, planner, batches, contexts)
    if batch in batches and context in contexts:
        at = contexts.index(context), batches.index(batch)
        left.add_patch(_frame(at))
    _curves(right, planner, batch, context)
    target = planner.target
    figure.suptitle(f"{target.name} on {target.hardware.name}: predicted, with assumed acceptance", fontsize=11)
    figure.savefig(file, dpi=150)


def _around(planner: Planner, batch: int, context: int) -> tuple[list[int], list[int]]:
    """A grid that shows where a single point lies."""
    limit = planner.target.config.full_attention_length
    doubled = [SHORTEST * 2**i for i in range(32) if SHORTEST * 2**i <= limit]
    return sorted({*BATCHES, batch}), sorted({*doubled, context})


def _frame(at: tuple[int, int]) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle((at[0] - 0.48, at[1] - 0.48), 0.96, 0.96, fill=False, linewidth=2.5, edgecolor="black")


def _frontiers(axes: Axes, planner: Planner, batches: Sequence[int], contexts: Sequence[int]) -> None:
    """Where speculation starts to pay, and where the rows stop fitting into memory."""
    rows = range(len(batches))
    pays = [_place(planner.break_even_context(b), contexts) for b in batches]
    axes.plot(pays, rows, color="tab:green", linewidth=2.5, label="pays to the right")
    if planner.target.hardware.usable_bytes is not None:
        fits = [_place(_longest(planner, b), contexts) for b in batches]
        axes.plot(fits, rows, color="tab:red", linewidth=2.5, linestyle="--", label="rows wait to the right: memory")
    axes.set_xlim(-0.5, len(contexts) - 0.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=8, frameon=False)


def _longest(planner: Planner, batch: int) -> int:
    """The longest context of which ``batch`` rows fit, decoded plainly."""
    held = memory(planner.target, None, batch, 1)
    return max(0, int((held.usable - held.weights) / held.cache))


def _place(context: int | None, contexts: Sequence[int]) -> float:
    """Where a length lies on the axis whose ticks are ``contexts``; beyond its ends at the margins."""
    if context is None or context > contexts[-1]:
        return len(contexts) - 0.5
    right = bisect_left(contexts, context)
    if right == 0:
        return -0.5 if context < contexts[0] else 0.0
    low, high = contexts[right - 1], contexts[right]
    return right - 1 + log(context / low) / log(high / low)


def _curves(axes: Axes, planner: Planner, batch: int, context: int) -> None:
    """The speed-up of the best drafts against acceptance; a dot marks what is assumed."""
    drafted = [choice for choice in planner.ranking(batch, context) if choice.draft][:CURVES]
    for choice in drafted:
        draft = choice.draft
        gains = []
        for rate in RATES:
            alone = replace(planner, candidates=(replace(draft, acceptance=given(rate)),))
            found = [c.speedup for c in alone.ranking(batch, context) if c.draft]
            gains.append(found[0])
        size = f" {draft.budget}" if draft.budget else f" {draft.config.kv}" if draft.network else ""
        (line,) = axes.plot(RATES, gains, label=f"{draft.key}{size}")
        rate = draft.acceptance.rate(context)
        if isinstance(rate, (int, float)):
            axes.plot([rate], [choice.speedup], "o", color=line.get_color())
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xlabel("acceptance per token (dots: assumed)")
    axes.set_ylabel("speed-up over plain decoding, best γ")
    axes.set_title(f"batch {batch}, context {context:,}", fontsize=10)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
