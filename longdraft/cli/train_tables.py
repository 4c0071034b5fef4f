"""What ``longdraft train`` says of its drafts in the end: tokens per round, as a table, a picture and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from longdraft.bench.trained import Evaluated
    from longdraft.train.stages import Outcome, Workshop


def evaluated(workshop: Workshop, done: Mapping[str, Outcome], plot: bool) -> dict[str, object]:
    """Measure, show and keep; what the last line of stdout has of it."""
    from longdraft.bench.trained import evaluate
    from longdraft.bench.trained_plot import plot_trained
    from longdraft.cli.bench import show
    from longdraft.cli.progress import Progress
    from longdraft.errors import MissingDependencyError

    out = workshop.out
    with Progress() as progress:
        found = evaluate(workshop, done, lambda n, total: progress.update("evaluate", n, total, "texts"))
    show([_rounds(found), _differences(found)])
    report = found.json()
    if plot:
        try:
            plot_trained(found, out / "tau.png", f"{out.name}: {found.texts} held-out texts")
            report["plot"] = str(out / "tau.png")
        except MissingDependencyError as error:
            typer.echo(str(error), err=True)
    (out / "tau.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def _rounds(found: Evaluated) -> object:
    """γ = k, beside the γ that the fuller model likes best."""
    from rich.table import Table

    table = Table(title=f"tokens per round of {found.k} proposals, {found.texts} held-out texts", title_justify="left")
    for column in (
        "method",
        "context",
        "T",
        "tokens/round, 95 %",
        "paper",
        "honest",
        "best γ",
        "trained on",
        "per weight",
    ):
        table.add_column(column, overflow="fold")
    best = {(row.method, row.context, row.temperature): row for row in found.rows if row.best}
    for row in found.rows:
        if row.gamma == found.k:
            top = best[(row.method, row.context, row.temperature)]
            rounds = f"{row.tokens_per_round:.3f} ({row.ci_low:.3f} to {row.ci_high:.3f})"
            speed = (f"{row.paper:.2f}x", f"{row.honest:.2f}x", f"{top.gamma}: {top.honest:.2f}x")
            trained = (f"{row.trained:,}", f"{row.per_weight:.2f}") if row.trained else ("", "")
            table.add_row(row.method, f"{row.context:,}", f"{row.temperature:g}", rounds, *speed, *trained)
    return table


def _differences(found: Evaluated) -> object:
    from rich.table import Table

    table = Table(title=f"tokens per round more than {found.baseline}, on the same texts", title_justify="left")
    for column in ("method", "context", "T", "difference, 95 %"):
        table.add_column(column, overflow="fold")
    for x in found.differences():
        value = f"{x['value']:+.3f} ({x['low']:+.3f} to {x['high']:+.3f})"
        table.add_row(x["method"], f"{x['context']:,}", f"{x['temperature']:g}", value)
    return table
